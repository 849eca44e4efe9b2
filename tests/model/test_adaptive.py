"""The softmax is one distribution over the vocabulary, in blocks and on a mesh.

`test_txl` compares its values, and the embedding's, with the reference.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels import softmax
from txl_jax.kernels.softmax import Limits
from txl_jax.model.adaptive import EmbeddingAndSoftmax
from txl_jax.model.config import ModelConfig
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding, shardings
from txl_jax.update.state import abstract_params

V, L = 41, 29
BOUNDS = [(0, 13), (13, 20), (20, V), (0, V)]
# Blocks of one score, and blocks whose sizes divide nothing.
ONE = Limits(1, 1)
UNEVEN = Limits(40, 8)
# As on a GPU: one block of all rows for the expected tokens, or several.
FIXED = Limits(200, V, fixed=True)
FEW = Limits(60, 9, fixed=True)

CLUSTERS: dict[str, Any] = {"cutoffs": (13, 20), "div_val": 2}
CASES: list[tuple[dict[str, Any], Limits]] = [
    ({}, UNEVEN),
    ({"cutoffs": (13, 20), "d_embed": 6, "tie_projs": (False, True, False)}, ONE),
    ({**CLUSTERS, "tie_projs": (True, True, True)}, UNEVEN),
    ({**CLUSTERS, "proj_same_dim": False, "tie_weights": False}, ONE),
    ({"cutoffs": (13, 20)}, FIXED),
    (CLUSTERS, FEW),
]


def gradients(config: ModelConfig, method: str) -> Callable[..., Any]:
    """Returns a jitted function of (params, hidden_BLD, targets_BL, weights_BL).

    Its result is (gradients of the weighted sum, nll_BL). The nll of the method
    log_probs is gathered from the dense log-probabilities.
    """

    def loss(params: Any, hidden_BLD: Any, targets_BL: Any, weights_BL: Any) -> Any:
        args = (hidden_BLD, targets_BL) if method == "nll" else (hidden_BLD,)
        nll_BL: Any = EmbeddingAndSoftmax(config).apply(
            {"params": params}, *args, method=method
        )
        if method == "log_probs":
            index_BL1 = targets_BL[..., None]
            nll_BL = -jnp.take_along_axis(nll_BL, index_BL1, axis=-1)[..., 0]
        return jnp.sum(nll_BL * weights_BL), nll_BL

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def draw(B: int, L: int, D: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    hidden_BLD, weights_BL = rng.normal(size=(B, L, D)), rng.normal(size=(B, L))
    return hidden_BLD.astype(np.float32), weights_BL.astype(np.float32)


@pytest.mark.parametrize(
    ("changes", "limits"),
    CASES,
    ids=str,
)
def test_blocks_add_up_to_the_dense_loss(
    changes: dict[str, Any], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets are in one cluster, for each cluster, or in all of them."""
    monkeypatch.setattr(softmax, "CPU", limits)
    monkeypatch.setattr(softmax, "PLAIN_SCORES", 0)
    monkeypatch.setattr(softmax, "MULTIPLE", 3)
    config, rng = tiny.config(vocab_size=V, **changes), np.random.default_rng(1)
    params = tiny.make_params(config)["embedding"]
    hidden_BLD, weights_BL = draw(1, L, tiny.D)
    methods = [gradients(config, method) for method in ("nll", "log_probs")]
    both = jax.jit(lambda *args: [grad(*args) for grad in methods])
    for bound in BOUNDS:
        targets_BL = rng.integers(*bound, (1, L), np.int32)
        direct, dense = both(params, hidden_BLD, targets_BL, weights_BL)
        tiny.assert_close(direct, dense)


def call(config: ModelConfig, method: str, params: Any, *args: Any) -> Any:
    run = functools.partial(EmbeddingAndSoftmax(config).apply, method=method)
    return jax.jit(run)({"params": params}, *args)


def test_logits_are_float32_under_bfloat16() -> None:
    config = tiny.config(dtype="bfloat16")
    params: dict[str, Array] = tiny.make_params()["embedding"]
    targets_BL = np.arange(tiny.V, dtype=np.int32)[None]
    hidden_BLD = draw(1, tiny.V, tiny.D)[0].astype(jnp.bfloat16)
    table_VD, bias_V = params["table"].astype(jnp.bfloat16), params["bias"]
    # Inputs are rounded, sums are not: bfloat16 sums would differ by 4e-3.
    scores_BLV = hidden_BLD.astype(float) @ table_VD.astype(float).T + bias_V
    expected_BLV = scores_BLV - np.log(np.exp(scores_BLV).sum(-1, keepdims=True))
    log_p_BLV = call(config, "log_probs", params, hidden_BLD)
    tiny.assert_close(log_p_BLV, expected_BLV)
    nll_BL = call(config, "nll", params, hidden_BLD, targets_BL)
    assert log_p_BLV.dtype == nll_BL.dtype == jnp.float32
    h_BLD = call(config, "embed", params, targets_BL)
    assert h_BLD.dtype == jnp.bfloat16


SPLIT: dict[str, dict[str, Any]] = {
    "one_table": {"d_model": 6, "cutoffs": (13, 20)},
    "tables": {"cutoffs": (12, 20), "div_val": 2},
    "tables_that_do_not_divide": {"cutoffs": (13, 21), "div_val": 2},
    "plain": {},
}
MESHES = [(4, 1, 2), (1, 2, 4), (2, 1, 4)]


@pytest.mark.parametrize(
    ("name", "mesh"),
    # The quick suite has one mesh for each vocabulary.
    [
        pytest.param(name, mesh, marks=() if m == n % 3 else pytest.mark.long)
        for n, name in enumerate(SPLIT)
        for m, mesh in enumerate(MESHES)
    ],
)
def test_the_vocabulary_may_be_split_over_devices(
    name: str, mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients are one device's, and no device sees all rows at once."""
    limits = Limits(15, 3, fixed=name == "one_table")
    monkeypatch.setattr(softmax, "CPU", limits)
    config = tiny.config(vocab_size=40, **SPLIT[name])
    devices = make_mesh(MeshConfig(*mesh))
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
        score = functools.partial(EmbeddingAndSoftmax(config).apply, method="nll")
        lowered = jax.jit(score).lower({"params": placed[0]}, *placed[1:3])
        assert "all-gather" not in str(lowered.compile().as_text())
