"""The vocabulary's two ends share one table, and likelihoods are float32.

Dims: B streams, L segment, D model, V vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.reference import Array
from txl_jax.model.adaptive import Vocabulary

B, L, V, D = 2, 5, tiny.V, tiny.D
PARAMS: dict[str, Array] = tiny.make_params()["embedding"]
TABLE_VD, BIAS_V = (np.asarray(PARAMS[name], np.float64) for name in ("table", "bias"))


def call(method: str, *args: Any, dtype: str = "float32") -> jax.Array:
    vocabulary = Vocabulary(tiny.config(dtype=dtype))
    return vocabulary.apply({"params": PARAMS}, *args, method=method)  # type: ignore


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
