"""Cross-entropy is exact, plain and by blocks, which store no logits.

`tests.model.test_adaptive` compares its values and gradients with the dense ones.

Dims: T tokens, E embedding, D hidden, V rows of a table.
"""

import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tests.support import tiny
from txl_jax.kernels import softmax
from txl_jax.kernels.softmax import PLAIN_SCORES, Table, cluster_sums, tile_sizes, zipf
from txl_jax.model.adaptive import EmbeddingAndSoftmax
from txl_jax.sharding.mesh import AXES
from txl_jax.update.state import abstract_params


def nll(h_TE: Any, target_T: Any, table_VE: Any) -> jax.Array:
    """Returns nll_T of a softmax over one table without biases."""
    V = len(table_VE)
    table = Table(table_VE, jnp.zeros(V))
    ((lse_T, score_T),) = cluster_sums((0, V), None, (h_TE,), target_T, (table,))
    return lse_T - score_T


@pytest.fixture(params=["plain", "blocks"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks":
        monkeypatch.setattr(softmax, "PLAIN_SCORES", 0)


@pytest.mark.usefixtures("_form")
def test_scores_that_overflow_are_exact() -> None:
    table_VE = np.array([[3e4], [1e3], [-3e4]], np.float32)
    nll_T = jax.jit(nll)(np.ones((2, 1)), np.array([0, 2]), table_VE)
    np.testing.assert_array_equal(nll_T, [0, 6e4])


@pytest.mark.usefixtures("_form")
def test_gradients_in_bfloat16_are_summed_in_float32() -> None:
    """500 tokens with one target: bfloat16 sums would stop at 256."""
    h_TE, target_T = jnp.ones((500, 1), jnp.bfloat16), jnp.zeros(500, jnp.int32)
    grad = jax.jit(jax.grad(lambda table: nll(h_TE, target_T, table).sum()))
    grad_VE = grad(jnp.zeros((2, 1)))
    np.testing.assert_allclose(grad_VE, [[-250], [250]])
    assert grad_VE.dtype == jnp.float32


@pytest.mark.parametrize(("more", "plain"), [(0, True), (1, False)])
def test_only_a_large_softmax_has_blocks(more: int, plain: bool) -> None:
    T, V = 1 << 10, PLAIN_SCORES >> 10
    shapes = [(T, 4), (T,), (V + more, 4)]
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("float32", "int32", "float32"), strict=True)
    ]
    text = jax.jit(nll).lower(*args).as_text()
    assert ("stablehlo.while" not in text) == plain


def test_a_gpu_has_few_blocks_for_the_expected_tokens() -> None:
    """Here for wt103_nvidia; elsewhere the number of blocks depends on the tokens."""
    axes, device = (AxisType.Auto,) * 3, AbstractDevice("H100", None, "gpu")
    mesh = AbstractMesh((1, 1, 1), AXES, axis_types=axes, abstract_device=device)
    T, ends = 104 * 192, (0, 20_000, 40_000, 200_000, 267_735)
    rows = [high - low for low, high in zip(ends, ends[1:], strict=False)]
    assert sum(zipf(ends[-1], ends[1:-1])) == pytest.approx(1)
    with jax.sharding.use_abstract_mesh(mesh):
        sizes = [tile_sizes(ends, i, T, rows[i]) for i in range(4)]
    blocks = [(T // 2, 2), (1312, 1), (1528, 2), (552, 1)]
    assert sizes == [(X, Y, n) for (X, n), Y in zip(blocks, rows, strict=True)]
    assert tile_sizes(ends, 0, T, rows[0])[2] == 0


def test_the_logits_are_never_stored() -> None:
    """Nor is a copy of a table; a table has one gradient array."""
    V, D, T = 60_000, 8, 2_000
    config = tiny.config(vocab_size=V, cutoffs=(1000, 5000), div_val=2)
    params = nn.unbox(abstract_params(config))["embedding"]

    def loss(params: Any, hidden_BLD: Any, targets_BL: Any) -> Any:
        apply = EmbeddingAndSoftmax(config).apply
        nll_BL: Any = apply({"params": params}, hidden_BLD, targets_BL, method="nll")
        return jnp.sum(nll_BL)

    hidden_BLD, targets_BL = jnp.zeros((1, T, D)), jnp.zeros((1, T), jnp.int32)
    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = grad.lower(params, hidden_BLD, targets_BL).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text() or "")
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest <= max(softmax.CPU.scores, V * D)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 4 * T * V
