"""Dropout drops the stated part, anew in every place and call, whatever the mesh.

Dims: B streams, L segment, D features.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import tiny
from txl_jax.model.dropout import Dropout, WordDropout
from txl_jax.model.memory import Memory

B, L, D = 6, 50, 64
RATE = 0.3


def apply(module: Any, *args: Any, seed: int | None = 0) -> np.ndarray[Any, Any]:
    rngs = None if seed is None else {"dropout": jax.random.key(seed)}
    return np.asarray(module.apply({}, *args, rngs=rngs))


def test_it_keeps_the_mean_and_drops_the_rate() -> None:
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


def test_relu_is_dropped_as_its_result_would_be() -> None:
    x_BLD = jax.random.normal(jax.random.key(1), (B, L, D))

    def read(module: Any, x_BLD: Any) -> Any:
        return module.apply({}, x_BLD, rngs={"dropout": jax.random.key(0)})

    def in_two(x_BLD: Any) -> Any:
        return read(Dropout(RATE), jax.nn.relu(x_BLD))

    def in_one(x_BLD: Any) -> Any:
        return read(Dropout(RATE, relu=True), x_BLD)

    (y_BLD, pull), (expected_BLD, pull_two) = (
        jax.vjp(f, x_BLD) for f in (in_one, in_two)
    )
    tiny.assert_close(y_BLD, expected_BLD)
    dy_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
    tiny.assert_close(pull(dy_BLD), pull_two(dy_BLD))
    # No mask waits for the backward pass.
    assert not [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype == bool]
    assert [leaf for leaf in jax.tree.leaves(pull_two) if leaf.dtype == bool]
    assert apply(Dropout(RATE, relu=True), -jnp.ones((1, 2)), seed=None).max() == 0
    nothing_BLD = np.asarray(in_one(jnp.full((B, L, D), jnp.nan)))
    assert np.isnan(nothing_BLD).mean() == (nothing_BLD != 0).mean() > 0.5


def test_it_is_off_without_rng_or_rate() -> None:
    x_BLD = jnp.ones((B, L, D))
    for rate, seed in ((RATE, None), (0.0, 0)):
        np.testing.assert_array_equal(apply(Dropout(rate), x_BLD, seed=seed), x_BLD)


def test_variational_masks_are_the_same_for_all_tokens() -> None:
    x_BLD = apply(Dropout(RATE, variational=True), jnp.ones((B, L, D)))
    np.testing.assert_array_equal(x_BLD, np.broadcast_to(x_BLD[:, :1], x_BLD.shape))
    kept_BD = x_BLD[:, 0] > 0
    assert 0.5 < kept_BD.mean() < 0.9
    assert len(np.unique(kept_BD, axis=0)) == B


def test_word_dropout_drops_a_word_wherever_it_stands() -> None:
    tokens_BL = np.arange(B * L, dtype=np.int32).reshape(B, L) % 100
    h_BLD = apply(WordDropout(RATE), jnp.ones((B, L, D)), tokens_BL)
    np.testing.assert_array_equal(h_BLD, np.broadcast_to(h_BLD[..., :1], h_BLD.shape))
    kept_BL = h_BLD[..., 0] > 0
    np.testing.assert_allclose(np.unique(h_BLD), [0, 1 / (1 - RATE)], rtol=1e-6)
    for token in range(100):
        assert len(set(kept_BL[tokens_BL == token])) == 1
    assert 0.5 < np.mean(kept_BL.flat[:100]) < 0.9


def test_the_model_has_both() -> None:
    """The memory of the first layer is the embeddings after dropout."""
    config = tiny.config(dropout=0.3, mem_len=4, variational=True, word_dropout=0.3)
    tokens_BL = np.tile(np.array([7, 3, 7, 7], np.int32), (B, 1))
    _, memory = tiny.apply(
        config,
        tiny.make_params(config),
        tokens_BL,
        Memory.empty(config, B),
        rngs={"dropout": jax.random.key(2)},
    )
    kept_BMD = np.asarray(memory.h_NBMD[0]) != 0
    # A word is dropped everywhere; a feature of a stream, for all tokens.
    kept_M = kept_BMD.any(axis=(0, 2))
    assert list(kept_M[[0, 2, 3]]) == [kept_M[0]] * 3 and kept_M.any()
    kept_BM1 = kept_BMD.any(axis=1, keepdims=True)
    np.testing.assert_array_equal(kept_BMD, kept_BM1 & kept_M[:, None])
    assert 0.4 < kept_BM1.mean() < 0.95
