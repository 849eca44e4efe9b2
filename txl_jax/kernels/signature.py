"""The signature that all attention kernels share.

Dims: B streams, L queries, M memory, K = M + L keys, R distances, H heads, A head.
"""

from typing import Protocol

from jax import Array

from txl_jax.kernels.hash import Dropout


class Kernel(Protocol):
    """Attention with relative positions (section 3.3), for all heads of a layer.

    The score of query i and key j is

        ((q_i + u) . k_j + (q_i + w) . r_{i-j} + bias_{i-j}) / sqrt(A),

    and the output is the sum of the values weighted by the softmax of the scores.

    r_RHA, bias_HR: in decreasing distance, from R - 1 to 0. If R < K, keys at greater
        distances use the first row. Without r_RHA, nothing depends on distance.
    u_HA, w_HA, bias_HR: None omits the term.
    oldest_BL: query i sees the keys oldest <= j <= i + M.
    dropout: of the probabilities, or None.

    Scores and softmax are float32; the output has the dtype of the values.
    """

    def __call__(
        self,
        q_BLHA: Array,
        k_BKHA: Array,
        v_BKHA: Array,
        r_RHA: Array | None,
        u_HA: Array | None,
        w_HA: Array | None,
        bias_HR: Array | None,
        oldest_BL: Array,
        dropout: Dropout | None,
        /,
    ) -> Array:
        """Returns o_BLHA."""
