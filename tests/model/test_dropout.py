"""Dropout has the stated rate, and a different mask in every call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import tiny
from txl_jax.model.dropout import Dropout
from txl_jax.model.memory import Memory

B, L, D = 6, 50, 64
RATE = 0.3


def apply(module: Any, *args: Any, seed: int | None = 0) -> np.ndarray[Any, Any]:
    rngs = None if seed is None else {"dropout": jax.random.key(seed)}
    return np.asarray(module.apply({}, *args, rngs=rngs))


def test_dropout_keeps_the_mean_and_drops_at_the_rate() -> None:
    ones_BLD = jnp.ones((B, L, D))
    x_BLD = apply(Dropout(RATE), ones_BLD)
    np.testing.assert_allclose(np.unique(x_BLD), [0, 1 / (1 - RATE)], rtol=1e-6)
    for axis in range(3):
        others = tuple({0, 1, 2} - {axis})
        kept = (x_BLD > 0).mean(axis=others)
        # Five standard errors of a proportion.
        error = 5 * (RATE * (1 - RATE) * x_BLD.shape[axis] / x_BLD.size) ** 0.5
        assert np.abs(kept - (1 - RATE)).max() < error
    other_BLD = apply(Dropout(RATE), ones_BLD, seed=1)
    assert 0.5 < ((x_BLD > 0) == (other_BLD > 0)).mean() < 0.65  # 0.58 by chance


def test_dropping_before_relu_equals_dropping_after() -> None:
    x_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
    rngs: Any = {"dropout": jax.random.key(0)}

    def in_two(x_BLD: Any) -> Any:
        return Dropout(RATE).apply({}, jax.nn.relu(x_BLD), rngs=rngs)

    def in_one(x_BLD: Any) -> Any:
        return Dropout(RATE, relu=True).apply({}, x_BLD, rngs=rngs)

    y_BLD, pull = jax.vjp(in_one, x_BLD)
    expected_BLD, pull_two = jax.vjp(in_two, x_BLD)
    tiny.assert_close(y_BLD, expected_BLD)
    dy_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
    tiny.assert_close(pull(dy_BLD), pull_two(dy_BLD))
    # No mask is kept for the backward pass.
    assert not [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype == bool]
    assert [leaf for leaf in jax.tree.leaves(pull_two) if leaf.dtype == bool]
    assert apply(Dropout(RATE, relu=True), -jnp.ones((1, 2)), seed=None).max() == 0
    nothing_BLD = np.asarray(in_one(jnp.full((B, L, D), jnp.nan)))
    assert np.isnan(nothing_BLD).mean() == (nothing_BLD != 0).mean() > 0.5


def test_output_and_remembered_embeddings_are_after_dropout() -> None:
    """The memory stores the layers' inputs. All kinds of dropout are on."""
    config = tiny.config(dropout=RATE, mem_len=L, variational=True, word_dropout=RATE)
    params, tokens_BL = tiny.make_params(config), tiny.make_tokens(B, L)
    memory, rngs = Memory.empty(config, B), {"dropout": jax.random.key(2)}
    hidden_BLD, memory = tiny.apply(config, params, tokens_BL, memory, rngs=rngs)
    kept_BLD = np.asarray(memory.h_NBMD[0]) != 0
    h_BLD = params["embedding"]["table"][tokens_BL] * tiny.D**0.5 / (1 - RATE) ** 2
    tiny.assert_close(memory.h_NBMD[0], np.where(kept_BLD, h_BLD, 0))
    # A word is dropped everywhere; a feature of a stream, for all tokens.
    kept_BL, kept_BD = kept_BLD.any(axis=2), kept_BLD.any(axis=1)
    np.testing.assert_array_equal(kept_BLD, kept_BL[..., None] & kept_BD[:, None])
    words = [set(kept_BL[tokens_BL == token]) for token in range(tiny.V)]
    assert all(len(word) == 1 for word in words) and len(set.union(*words)) == 2
    assert len(np.unique(kept_BD, axis=0)) > 1
    for kept in (kept_BL, kept_BD, hidden_BLD != 0):
        assert 0.4 < kept.mean() < 0.95
