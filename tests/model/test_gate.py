"""Gated residuals begin near the identity.

`tests.model.test_txl` compares them with `tests.reference`, `test_gradients` their
gradients.
"""

import math

import jax
import numpy as np

from tests.support import tiny
from txl_jax.model.gate import Gate

B, L = 2, 4
GATED = tiny.config(pre_lnorm=True, gate="gru")


def test_the_initial_gate_is_nearly_closed() -> None:
    """Without weights g is (1 - z) x with z = s(-2)."""
    x_BLD = np.random.default_rng(0).normal(size=(B, L, tiny.D)).astype(np.float32)
    params = Gate(GATED).init(jax.random.key(0), x_BLD, x_BLD)["params"]
    params = jax.tree.map(lambda leaf: leaf * (leaf.ndim == 1), params)
    g_BLD = Gate(GATED).apply({"params": params}, x_BLD, x_BLD)
    tiny.assert_close(g_BLD, x_BLD / (1 + math.exp(-2)))
