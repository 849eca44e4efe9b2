"""The embedding's tables and the softmax make one distribution over the vocabulary.

`test_txl` compares their values with the reference.

Dims: B streams, L segment, D model, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.adaptive import Vocabulary

V, D = tiny.V, tiny.D
PARAMS: dict[str, Array] = tiny.make_params()["embedding"]
TARGETS_BL = np.arange(V, dtype=np.int32)[None]  # each target once
HIDDEN_BLD = np.random.default_rng(0).normal(size=(1, V, D)).astype(np.float32)

# V is 12: clusters of 5, 4 and 3, of which the last has embeddings of 2.
CLUSTERS: list[dict[str, Any]] = [
    {"cutoffs": (5, 9), "d_embed": 6, "tie_projs": (False, True, False)},
    {"cutoffs": (5, 9), "div_val": 2, "tie_projs": (True, True, True)},
    {"cutoffs": (5, 9), "div_val": 2, "proj_same_dim": False, "tie_weights": False},
    {"cutoffs": (1,), "div_val": 4, "d_embed": 4},
    {},
]


def call(method: str, params: Any, *args: Any, **changes: Any) -> Any:
    """Returns the result of a method of the vocabulary with some fields changed."""
    vocabulary = Vocabulary(tiny.config(**changes))
    return vocabulary.apply({"params": params}, *args, method=method)


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
def test_nll_has_the_values_and_gradients_of_log_probs(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    params = tiny.make_params(config)["embedding"]

    def direct(params: Any, hidden_BLD: Any, weights_V: Any) -> Any:
        nll_BL = call("nll", params, hidden_BLD, TARGETS_BL, **changes)
        return jnp.sum(nll_BL * weights_V), nll_BL

    def dense(params: Any, hidden_BLD: Any, weights_V: Any) -> Any:
        log_p_BLV = call("log_probs", params, hidden_BLD, **changes)
        return -jnp.sum(jnp.diagonal(log_p_BLV[0]) * weights_V), log_p_BLV

    run, run_dense = (
        tiny.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        for loss in (direct, dense)
    )
    weights_V = np.linspace(1, 2, V, dtype=np.float32)
    grads, nll_BL = run(params, HIDDEN_BLD, weights_V)
    expected, log_p_BLV = run_dense(params, HIDDEN_BLD, weights_V)
    tiny.assert_close(np.exp(log_p_BLV).sum(-1), np.ones((1, V)))
    tiny.assert_close(nll_BL[0], -np.diagonal(log_p_BLV[0]))
    tiny.assert_close(grads, expected)
    # A rare token's target gives no gradient to the rows of other clusters.
    (last, _), _ = run(params, HIDDEN_BLD, np.eye(V, dtype=np.float32)[-1])
    bounds = (0, *config.cutoffs, V)
    expected_V = (np.arange(V) < bounds[1]) | (np.arange(V) >= bounds[-2])
    np.testing.assert_array_equal(np.asarray(last["bias"]) != 0, expected_V)


def test_logits_of_3000_nats_are_exact() -> None:
    """The exponential of such a logit is infinite."""
    log_p_BLV = call("log_probs", PARAMS, 1e3 * HIDDEN_BLD)
    nll_BL = call("nll", PARAMS, 1e3 * HIDDEN_BLD, TARGETS_BL)
    assert np.abs(log_p_BLV).max() > 3000
    tiny.assert_close(nll_BL[0], -np.diagonal(log_p_BLV[0]))


def test_logits_are_float32_under_bfloat16() -> None:
    hidden_BLD = HIDDEN_BLD.astype(jnp.bfloat16)
    table_VD, bias_V = PARAMS["table"].astype(jnp.bfloat16), PARAMS["bias"]
    # Inputs are rounded, sums are not: bfloat16 sums would differ by 4e-3.
    scores_BLV = hidden_BLD.astype(float) @ table_VD.astype(float).T + bias_V
    expected_BLV = scores_BLV - np.log(np.exp(scores_BLV).sum(-1, keepdims=True))
    log_p_BLV = call("log_probs", PARAMS, hidden_BLD, dtype="bfloat16")
    tiny.assert_close(log_p_BLV, expected_BLV)
    nll_BL = call("nll", PARAMS, hidden_BLD, TARGETS_BL, dtype="bfloat16")
    assert log_p_BLV.dtype == nll_BL.dtype == jnp.float32
    h_BLD = call("embed", PARAMS, TARGETS_BL, dtype="bfloat16")
    assert h_BLD.dtype == jnp.bfloat16
