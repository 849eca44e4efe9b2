"""The operands of attention kernels: queries, keys, values, positions and intervals.

Dims: L queries, K = M + L keys, R distances.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from txl_jax.kernels.hash import AttentionDropout


class PositionTerms(NamedTuple):
    """The terms of a score that the position scheme adds; None omits a term.

    r_RHA and bias_HR are in decreasing distance, from R - 1 to 0. If R < K, keys at
    greater distances use the first row. u_HA and w_HA (the paper's v) are added to the
    queries of products with keys and with r.
    """

    r_RHA: Array | None = None
    u_HA: Array | None = None
    w_HA: Array | None = None
    bias_HR: Array | None = None


class Operands(NamedTuple):
    """The argument of every kernel; the letters of a name are its dimensions.

    Query i sees keys oldest[i] to i + M; key i + M is its own.
    """

    q_BLHA: Array
    k_BKHA: Array
    v_BKHA: Array
    position: PositionTerms
    oldest_BL: Array  # int32
    dropout: AttentionDropout | None = None


Kernel = Callable[[Operands], Array]  # returns o_BLHA, like `xla.rel_attention`
