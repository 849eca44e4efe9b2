"""Gated residuals begin near the identity and end, closed, at it.

`tests.model.test_txl` compares them with `tests.reference`, `test_gradients` their
gradients.
"""

import math

import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.model.gate import Gate
from txl_jax.model.memory import Memory

B, L = 2, 4
GATED = tiny.config(pre_lnorm=True, gate="gru")
BASE = tiny.config(pre_lnorm=True)


def test_a_closed_gate_leaves_the_base_model_without_its_sublayers() -> None:
    """To the bit: z is 0, and x + 0 is x."""
    params = jax.tree.map(np.copy, tiny.make_params(GATED))
    silent = jax.tree.map(np.copy, tiny.make_params(BASE))
    for name in ("attention", "feed_forward"):
        params["layers"][name]["gru"]["bias"][:] = 1e3
    silent["layers"]["attention"]["o"][:] = 0
    for leaf in silent["layers"]["feed_forward"]["out"].values():
        leaf[:] = 0
    silent["embedding"] = params["embedding"]
    tokens_BL = tiny.make_tokens(B, L)
    actual, expected = (
        tiny.apply(config, each, tokens_BL, Memory.empty(config, B))
        for config, each in ((GATED, params), (BASE, silent))
    )
    tiny.assert_equal(actual, expected)


def test_the_initial_gate_is_nearly_closed() -> None:
    """Without weights g is (1 - z) x with z = s(-2)."""
    x_BLD = np.random.default_rng(0).normal(size=(B, L, tiny.D)).astype(np.float32)
    params = Gate(GATED).init(jax.random.key(0), x_BLD, x_BLD)["params"]
    params = jax.tree.map(lambda leaf: leaf * (leaf.ndim == 1), params)
    g_BLD = Gate(GATED).apply({"params": params}, x_BLD, x_BLD)
    tiny.assert_close(g_BLD, x_BLD / (1 + math.exp(-2)))


def test_a_gate_needs_norms_before_the_sublayers() -> None:
    with pytest.raises(UserError, match='model.gate = "gru" needs model.pre_lnorm'):
        tiny.config(gate="gru")
