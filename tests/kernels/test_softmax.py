"""Cross-entropy by blocks is the dense one, whatever the blocks, and stores no logits.

Dims: T tokens, D hidden, V rows of all tables.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels import cluster
from txl_jax.kernels.cluster import Rows, Table, Tokens
from txl_jax.kernels.softmax import blockwise_nll
from txl_jax.model.adaptive import Vocabulary
from txl_jax.model.config import ModelConfig
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, sharding, shardings
from txl_jax.update.init import abstract_params

V, D, T = 41, 6, 29
CUTOFFS = (13, 20)
CONFIGS = {
    "plain": tiny.config(vocab_size=V, d_model=D),
    "one_table": tiny.config(vocab_size=V, d_model=D, cutoffs=CUTOFFS),
    "tables": tiny.config(vocab_size=V, d_model=D, cutoffs=CUTOFFS, div_val=2),
}
BOUNDS = {"first": (0, 13), "second": (13, 20), "third": (20, V), "all": (0, V)}


# Blocks of one score, and of sizes that divide nothing.
SHAPES = [[(1, 1, 1), (1, 1, 1)], [(40, 8, 4), (24, 4, 3)]]


def gradients(config: ModelConfig, method: str) -> Callable[..., Any]:
    """Returns a jitted function of (params, hidden_BLD, targets_BL, weights_BL).

    Its result is (gradients of the weighted sum, nll_BL). The nll of the method
    log_probs is gathered from the dense log-probabilities.
    """

    def loss(params: Any, hidden_BLD: Any, targets_BL: Any, weights_BL: Any) -> Any:
        args = (hidden_BLD, targets_BL) if method == "nll" else (hidden_BLD,)
        nll_BL: Any = Vocabulary(config).apply({"params": params}, *args, method=method)
        if method == "log_probs":
            index_BL1 = targets_BL[..., None]
            nll_BL = -jnp.take_along_axis(nll_BL, index_BL1, axis=-1)[..., 0]
        return jnp.sum(nll_BL * weights_BL), nll_BL

    return tiny.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def draw(B: int, L: int, D: int) -> tuple[Array, Array]:
    """Returns hidden states and weights."""
    rng = np.random.default_rng(0)
    hidden_BLD, weights_BL = rng.normal(size=(B, L, D)), rng.normal(size=(B, L))
    return hidden_BLD.astype(np.float32), weights_BL.astype(np.float32)


def values_and_gradients(config: ModelConfig, method: str) -> dict[str, Any]:
    """Returns the results of `gradients` for the targets of each bound."""
    params, run = tiny.make_params(config)["embedding"], gradients(config, method)
    hidden_BLD, weights_BL = draw(1, T, D)
    rng = np.random.default_rng(1)
    return {
        name: run(
            params, hidden_BLD, rng.integers(*bound, (1, T), np.int32), weights_BL
        )
        for name, bound in BOUNDS.items()
    }


@functools.cache
def dense(name: str) -> dict[str, Any]:
    return values_and_gradients(CONFIGS[name], "log_probs")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("limits", SHAPES, ids=str)
def test_blocks_add_up_to_the_dense_loss(
    limits: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens in all clusters, and with all of them in one."""
    common, rare = (cluster.Block(*each) for each in limits)
    monkeypatch.setattr(cluster, "CPU", cluster.Limits(common, rare))
    tiny.assert_close(values_and_gradients(CONFIGS[name], "nll"), dense(name))


def test_scores_that_overflow_are_exact() -> None:
    tokens = Tokens(jnp.ones((2, 1)), jnp.array([0, 2]), 0, 2)
    table_VE, bias_V = jnp.array([[3e4], [1e3], [-3e4]]), jnp.zeros(3)
    nll_T = blockwise_nll(((Rows(0, 0, 3, 0),),), (tokens,), (Table(table_VE, bias_V),))
    np.testing.assert_array_equal(nll_T, [0, 6e4])


def test_gradients_in_bfloat16_are_summed_in_float32() -> None:
    """500 tokens with one target: bfloat16 sums would stop at 256."""
    h_TE = jnp.ones((500, 1), jnp.bfloat16)
    bias_V = jnp.zeros(2)

    def loss(table_VE: Any) -> Any:
        tokens = Tokens(h_TE, jnp.zeros(500, jnp.int32), 0, 500)
        return blockwise_nll(
            ((Rows(0, 0, 2, 0),),), (tokens,), (Table(table_VE, bias_V),)
        ).sum()

    grad_VE = jax.jit(jax.grad(loss))(jnp.zeros((2, 1)))
    np.testing.assert_allclose(grad_VE, [[-250], [250]])
    assert grad_VE.dtype == jnp.float32


@pytest.mark.exact_bits
@pytest.mark.parametrize("changes", [{}, {"cutoffs": (1000, 5000), "div_val": 2}])
def test_nothing_as_large_as_the_logits_is_stored(changes: dict[str, Any]) -> None:
    """And no copy of a table, of which there is one gradient."""
    V, D, T = 60_000, 8, 2_000
    config = tiny.config(vocab_size=V, d_model=D, **changes)
    params = nn.unbox(abstract_params(config))["embedding"]

    def loss(params: Any, hidden_BLD: Any, targets_BL: Any) -> Any:
        apply = Vocabulary(config).apply
        nll_BL: Any = apply({"params": params}, hidden_BLD, targets_BL, method="nll")
        return jnp.sum(nll_BL)

    hidden_BLD, targets_BL = jnp.zeros((1, T, D)), jnp.zeros((1, T), jnp.int32)
    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = grad.lower(params, hidden_BLD, targets_BL).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text() or "")
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest <= max(cluster.CPU.common.scores, V * D)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 4 * T * V


SPLIT = {
    "plain": tiny.config(vocab_size=40, d_model=D),
    "one_table": tiny.config(vocab_size=40, d_model=D, cutoffs=(13, 20)),
    "tables": tiny.config(vocab_size=40, d_model=8, cutoffs=(12, 20), div_val=2),
    "tables_that_do_not_divide": tiny.config(
        vocab_size=40, d_model=8, cutoffs=(13, 21), div_val=2
    ),
}
MESHES = [(4, 1, 2), (1, 2, 4), (2, 1, 4)]
ROWS = [(name, mesh) for name in SPLIT for mesh in MESHES]


@pytest.mark.parametrize(
    ("name", "mesh"),
    # In the quick suite one mesh for each vocabulary.
    [
        pytest.param(*row, marks=() if n in (0, 4, 8, 9) else pytest.mark.long)
        for n, row in enumerate(ROWS)
    ],
)
def test_the_vocabulary_may_be_split_over_devices(
    name: str, mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients are one device's, and no device sees all rows at once."""
    small = cluster.Block(15, 3, 1)
    monkeypatch.setattr(cluster, "CPU", cluster.Limits(small, small))
    config, devices = SPLIT[name], make_mesh(MeshConfig(*mesh))
    params = tiny.make_params(config)["embedding"]
    hidden_BLD, weights_BL = draw(4, 7, config.d_model)
    targets_BL = np.random.default_rng(1).integers(0, 40, (4, 7), np.int32)
    grad = gradients(config, "nll")
    expected = grad(params, hidden_BLD, targets_BL, weights_BL)
    specs = nn.get_partition_spec(abstract_params(config))["embedding"]
    places = shardings(devices, specs)
    if name == "tables_that_do_not_divide":
        places = sharding(devices, "")
    placed = jax.device_put(
        (params, hidden_BLD, targets_BL, weights_BL),
        (places, *(sharding(devices, letters) for letters in ("BLD", "BL", "BL"))),
    )
    tiny.assert_close(grad(*placed), expected)
    if mesh == (4, 1, 2) and config.div_val == 1:
        score = functools.partial(Vocabulary(config).apply, method="nll")
        lowered = jax.jit(score).lower({"params": placed[0]}, *placed[1:3])
        assert "all-gather" not in str(lowered.compile().as_text())
