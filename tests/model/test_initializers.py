"""Initial parameters have the distributions of the published code bases."""

import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.config import pytorch, tensorflow
from txl_jax.model.residual import Gate
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
