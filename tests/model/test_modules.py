"""Initial parameters, gates, biases and dropout.

Initial parameters have the distributions of the published code bases. Dropout has the
stated rate, and a different mask in every call.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.config import pytorch, tensorflow
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Dropout, Gate, add_bias
from txl_jax.update.state import abstract_params, init_params

SIZES: dict[str, Any] = dict(vocab_size=3000, cutoffs=(1000, 2000), div_val=2)
SIZES |= dict(n_layer=1, d_model=64, n_head=4, d_head=32, d_inner=128)
SIZES |= dict(init_std=0.05, untie_r=True)
# The generator rbg compiles fastest.
KEY = jax.random.key(0, impl="rbg")
WEIGHTS = {"q", "k", "v", "r", "o", "kernel", "u", "w", "table_0", "table_1", "table_2"}


@pytest.mark.parametrize(
    "family", [pytorch, pytest.param(tensorflow, marks=pytest.mark.long)]
)
def test_parameters_have_the_distributions_of_their_family(family: Any) -> None:
    config = family(**SIZES)
    stds = {"scale": config.norm_init_std, "cluster_table": config.norm_init_std}
    stds |= dict.fromkeys(WEIGHTS, config.init_std)
    params = nn.unbox(jax.jit(lambda: init_params(config, KEY))())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        mean = 1.0 if name == "scale" else 0.0
        std = config.proj_init_std if "proj" in name else stds.get(name, 0.0)
        if not std:
            assert (leaf == mean).all(), name
            continue
        # Five standard errors.
        assert abs(leaf.mean() - mean) < 5 * std / leaf.size**0.5, name
        assert abs(leaf.std() / std - 1) < 5 / (2 * leaf.size) ** 0.5, name


def test_gated_layers_have_as_many_parameters_as_plain_ones() -> None:
    """Only the gate's biases differ, since the size here needs no rounding."""

    def count(feed_forward: str) -> int:
        config = tiny.config(d_inner=48, feed_forward=feed_forward)
        return sum(x.size for x in jax.tree.leaves(abstract_params(config)))

    assert count("swiglu") - count("relu") == tiny.N * (2 * 32 - 48)


def test_the_initial_gate_is_nearly_closed() -> None:
    """With zero weights, g is (1 - z) x with z = s(-2)."""
    config = tiny.config(**tiny.GATED)
    x_BLD = np.random.default_rng(0).normal(size=(2, 4, tiny.D)).astype(np.float32)
    params = Gate(config).init(jax.random.key(0), x_BLD, x_BLD)["params"]
    params = jax.tree.map(lambda leaf: leaf * (leaf.ndim == 1), params)
    g_BLD = Gate(config).apply({"params": params}, x_BLD, x_BLD)
    tiny.assert_close(g_BLD, x_BLD / (1 + math.exp(-2)))


def test_the_gradient_of_a_bias_is_summed_in_float32() -> None:
    """Summed in bfloat16, 4,096 equal gradients would stop growing at 256 of them."""
    y_BLY = jnp.zeros((8, 512, 3), jnp.bfloat16)
    bias_Y = jnp.arange(3, dtype=jnp.bfloat16)
    z_BLY, pull = jax.vjp(add_bias, y_BLY, bias_Y)
    assert (z_BLY == bias_Y).all()
    grad_BLY = np.random.default_rng(0).normal(1, 0.1, y_BLY.shape)
    grad_y_BLY, grad_Y = pull(grad_BLY.astype(jnp.bfloat16))
    assert (grad_y_BLY == grad_BLY.astype(jnp.bfloat16)).all()
    assert grad_Y.dtype == jnp.bfloat16
    expected_Y = grad_BLY.sum(axis=(0, 1))
    tiny.assert_close(np.asarray(grad_Y, float), expected_Y, tiny.BFLOAT16)


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
    rates = dict.fromkeys(("dropout", "outer_dropout", "word_dropout"), RATE)
    config = tiny.config(mem_len=L, variational=True, **rates | {"dropout": 0.1})
    params, tokens_BL = tiny.make_params(config), tiny.make_tokens(B, L)
    memory, rngs = Memory.empty(config, B), {"dropout": jax.random.key(2)}
    hidden_BLD, memory = tiny.apply(config, params, tokens_BL, memory, rngs=rngs)
    kept_BLD = np.asarray(memory.h_NBMD[0]) != 0
    h_BLD = params["embedding"]["table"][tokens_BL] * tiny.D**0.5 / (1 - RATE) ** 2
    tiny.assert_close(memory.h_NBMD[0], np.where(kept_BLD, h_BLD, 0))
    # A word is dropped everywhere but at the start; a feature of a stream, for all
    # tokens.
    kept_BL, kept_BD = kept_BLD.any(axis=2), kept_BLD.any(axis=1)
    np.testing.assert_array_equal(kept_BLD, kept_BL[..., None] & kept_BD[:, None])
    assert kept_BL[:, 0].all()
    later_BL = kept_BL[:, 1:]
    words = [set(later_BL[tokens_BL[:, 1:] == token]) for token in range(tiny.V)]
    assert all(len(word) == 1 for word in words) and len(set.union(*words)) == 2
    assert len(np.unique(kept_BD, axis=0)) > 1
    for kept in (kept_BL, kept_BD, hidden_BLD != 0):
        assert 0.4 < kept.mean() < 0.95
