"""The vocabulary's two ends are one distribution, with clusters and without.

Dims: B streams, L segment, D model, V vocabulary.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.adaptive import Vocabulary

B, L, V, D = 2, 5, tiny.V, tiny.D
PARAMS: dict[str, Array] = tiny.make_params()["embedding"]
TABLE_VD, BIAS_V = (np.asarray(PARAMS[name], np.float64) for name in ("table", "bias"))


# V is 12: clusters of 5, 4 and 3, of which the last has embeddings of 2.
CLUSTERS: list[dict[str, Any]] = [
    {"cutoffs": (5, 9)},
    {"cutoffs": (5, 9), "d_embed": 6, "tie_projs": (False, True, False)},
    {"cutoffs": (5, 9), "div_val": 2},
    {"cutoffs": (5, 9), "div_val": 2, "tie_projs": (True, True, True)},
    {"cutoffs": (5, 9), "div_val": 2, "proj_same_dim": False, "tie_weights": False},
    {"cutoffs": (1,), "div_val": 4, "d_embed": 4},
    {"d_embed": 6, "tie_weights": False},
]


def call(method: str, *args: Any, dtype: str = "float32") -> jax.Array:
    vocabulary = Vocabulary(tiny.config(dtype=dtype))
    apply = functools.partial(vocabulary.apply, {"params": PARAMS}, method=method)
    return tiny.jit(apply)(*args)


def make_clusters(changes: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (function of (method, params, ...), params) of a vocabulary."""
    config = tiny.config(**changes)

    def call(method: str, params: Any, *args: Any) -> jax.Array:
        found: Any = Vocabulary(config).apply({"params": params}, *args, method=method)
        return found

    return call, tiny.make_params(config)["embedding"]


def make_hidden(scale: float = 1.0) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(scale * rng.normal(size=(B, L, D)), jnp.float32)


def test_embedding_is_the_tables_row_times_sqrt_d() -> None:
    tokens_BL = tiny.make_tokens(B, L)
    h_BLD = call("embed", tokens_BL)
    tiny.assert_close(h_BLD, TABLE_VD[tokens_BL] * math.sqrt(D))


def log_softmax(scores_BLV: Array) -> Array:
    """Returns log-probabilities of scores, in float64."""
    scores_BLV = scores_BLV - scores_BLV.max(-1, keepdims=True)
    return scores_BLV - np.log(np.exp(scores_BLV).sum(-1, keepdims=True))


def test_scores_are_the_same_table_and_the_bias() -> None:
    hidden_BLD = make_hidden()
    log_p_BLV = call("log_probs", hidden_BLD)
    scores_BLV = np.asarray(hidden_BLD, np.float64) @ TABLE_VD.T + BIAS_V
    tiny.assert_close(log_p_BLV, log_softmax(scores_BLV))
    assert sorted(PARAMS) == ["bias", "table"]


# At 1,000 logits reach 3,000 nats: exp of them is infinite.
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_nll_is_minus_the_log_probability_of_the_target(scale: float) -> None:
    hidden_BLD, targets_BL = make_hidden(scale), tiny.make_tokens(B, L, 2)
    nll_BL = call("nll", hidden_BLD, targets_BL)
    log_p_BLV = np.asarray(call("log_probs", hidden_BLD), np.float64)
    expected_BL1 = -np.take_along_axis(log_p_BLV, targets_BL[..., None], axis=-1)
    tiny.assert_close(nll_BL, expected_BL1[..., 0])
    tiny.assert_close(np.exp(log_p_BLV).sum(-1), np.ones((B, L)))


def test_logits_are_float32_under_bfloat16() -> None:
    hidden_BLD = make_hidden().astype(jnp.bfloat16)
    rounded_VD = np.asarray(jnp.asarray(TABLE_VD, jnp.bfloat16), np.float64)
    log_p_BLV = call("log_probs", hidden_BLD, dtype="bfloat16")
    # Inputs are rounded, sums are not: bfloat16 sums would differ by 4e-3.
    scores_BLV = np.asarray(hidden_BLD, np.float64) @ rounded_VD.T + BIAS_V
    tiny.assert_close(log_p_BLV, log_softmax(scores_BLV))
    targets_BL = tiny.make_tokens(B, L, 2)
    for method, args in (
        ("log_probs", (hidden_BLD,)),
        ("nll", (hidden_BLD, targets_BL)),
    ):
        assert call(method, *args, dtype="bfloat16").dtype == jnp.float32, method


def test_embeddings_are_in_the_computations_dtype() -> None:
    tokens_BL = tiny.make_tokens(B, L)
    assert call("embed", tokens_BL, dtype="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
def test_clusters_make_one_distribution_over_the_vocabulary(
    changes: dict[str, Any],
) -> None:
    call, params = make_clusters(changes)
    call = tiny.jit(call, static_argnums=0)
    hidden_BLD = make_hidden()
    log_p_BLV = np.asarray(call("log_probs", params, hidden_BLD), np.float64)
    assert log_p_BLV.shape == (B, L, V)
    tiny.assert_close(np.exp(log_p_BLV).sum(-1), np.ones((B, L)))
    for target in range(V):
        targets_BL = np.full((B, L), target, np.int32)
        nll_BL = call("nll", params, hidden_BLD, targets_BL)
        tiny.assert_close(nll_BL, -log_p_BLV[..., target])


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
def test_gradients_of_clusters_are_those_of_the_whole_distribution(
    changes: dict[str, Any],
) -> None:
    call, params = make_clusters(changes)
    targets_BL = tiny.make_tokens(B, L, 2)

    def direct(params: Any, hidden_BLD: jax.Array) -> jax.Array:
        return jnp.sum(call("nll", params, hidden_BLD, targets_BL))

    def dense(params: Any, hidden_BLD: jax.Array) -> jax.Array:
        log_p_BLV = call("log_probs", params, hidden_BLD)
        return -jnp.sum(jnp.take_along_axis(log_p_BLV, targets_BL[..., None], axis=-1))

    actual, expected = (
        tiny.jit(jax.grad(loss, argnums=(0, 1)))(params, make_hidden())
        for loss in (direct, dense)
    )
    tiny.assert_close(actual, expected)


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
def test_a_rare_tokens_target_takes_part_in_its_own_cluster_alone(
    changes: dict[str, Any],
) -> None:
    """The other clusters' rows get no gradient from it."""
    call, params = make_clusters(changes)
    config = tiny.config(**changes)
    bounds = (0, *config.cutoffs, V)
    targets_BL = np.full((B, L), V - 1, np.int32)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(call("nll", params, make_hidden(), targets_BL))

    bias_V = np.asarray(tiny.jit(jax.grad(loss))(params)["bias"])
    expected_V = np.zeros(V, bool)
    expected_V[: bounds[1]] = expected_V[bounds[-2] :] = True
    np.testing.assert_array_equal(bias_V != 0, expected_V)


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
def test_embeddings_of_clusters_are_their_own_rows_projected(
    changes: dict[str, Any],
) -> None:
    call, params = make_clusters(changes)
    config = tiny.config(**changes)
    h_BLD = call("embed", params, np.arange(V)[None])
    bounds = (0, *config.cutoffs, V)
    rows = []
    for i, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        end = "" if config.div_val == 1 else f"_{i}"
        first = low if config.div_val == 1 else 0
        table_VE = params[f"table{end}"][first : first + high - low]
        proj_ED = params.get(f"proj{end}", np.eye(D))
        rows.append(table_VE.astype(np.float64) @ proj_ED)
    tiny.assert_close(h_BLD[0], np.concatenate(rows) * math.sqrt(D))
