"""The einsum kernel computes the formula, and dropout from the stated hash."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import ARRAYS, Case, cast, pack
from tests.reference import Array
from tests.support.tiny import BFLOAT16, assert_close
from txl_jax.kernels import chunked, cudnn
from txl_jax.kernels.check import differentiate, errors, make_operands
from txl_jax.kernels.hash import AttentionDropout, keep_BHLK
from txl_jax.kernels.operands import Kernel
from txl_jax.kernels.xla import rel_attention

CASE = Case(3, 4, "random")
B, H, L, K = CASE.B, CASE.H, CASE.L, CASE.L + CASE.M


def attend(
    inputs: dict[str, Any], dropout: AttentionDropout | None = None
) -> jax.Array:
    return jax.jit(rel_attention)(pack(inputs, dropout))


def literal_attention(
    inputs: dict[str, Any], keep_BHLK: Array | None = None, rate: float = 0.0
) -> Array:
    """The formula for one stream, head, query and key at a time."""
    arrays = (inputs[name] for name in ARRAYS)
    q_BLHA, k_BKHA, v_BKHA, r_RHA, u_HA, w_HA, bias_HR = arrays
    oldest_BL = inputs["oldest_BL"]
    B, L, H, A = q_BLHA.shape
    M = k_BKHA.shape[1] - L
    o_BLHA = np.zeros((B, L, H, A))
    for b, i, h in np.ndindex(B, L, H):
        keys = range(oldest_BL[b, i], i + M + 1)
        scores = []
        for j in keys:
            column = len(r_RHA) - 1 - (i + M - j)
            score = (q_BLHA[b, i, h] + u_HA[h]) @ k_BKHA[b, j, h]
            score += (q_BLHA[b, i, h] + w_HA[h]) @ r_RHA[column, h]
            score += 0 if bias_HR is None else bias_HR[h, column]
            scores.append(float(score) / math.sqrt(A))
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, j in zip(weights, keys, strict=True):
            if keep_BHLK is None or keep_BHLK[b, h, i, j]:
                probability = weight / sum(weights) / (1 - rate)
                o_BLHA[b, i, h] += probability * v_BKHA[b, j, h]
    return o_BLHA


CASES = [
    Case(1, 4, "random"),
    Case(3, 0, "random"),
    Case(2, 7, "random", absent=("bias_HR",)),
    Case(3, 4, "itself"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rel_attention_is_the_formula(case: Case) -> None:
    inputs = case.inputs()
    assert_close(attend(inputs), literal_attention(inputs))


@pytest.mark.parametrize(("L", "M", "R"), [(3, 4, 1), (3, 4, 6), (1, 9, 3)])
def test_keys_beyond_the_last_distance_have_its_row(L: int, M: int, R: int) -> None:
    inputs, K = Case(L, M, "random").inputs(), L + M
    inputs["r_RHA"][: K - R] = inputs["r_RHA"][K - R]
    inputs["bias_HR"][:, : K - R] = inputs["bias_HR"][:, K - R, None]
    few = {"r_RHA": inputs["r_RHA"][K - R :], "bias_HR": inputs["bias_HR"][:, K - R :]}
    assert_close(attend(inputs | few), literal_attention(inputs))


def test_bfloat16_scores_and_softmax_are_float32() -> None:
    """All keys share a score of 128 / sqrt(A): bfloat16 would round the rest to 0.5."""
    inputs = CASE.inputs()
    for key, query in (("k_BKHA", "u_HA"), ("r_RHA", "w_HA")):
        inputs[key][..., 0] = 4
        inputs[query][..., 0] = 16
    o_BLHA = attend(cast(inputs, jnp.bfloat16))
    assert o_BLHA.dtype == jnp.bfloat16
    # The weights and the result are rounded, to 8 bits each.
    assert_close(o_BLHA, literal_attention(inputs), BFLOAT16)


def literal_murmur3(x: int) -> int:
    """MurmurHash3's finalizer in Python's integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def test_dropout_is_the_stated_hash() -> None:
    # 0x514E28B7 is MurmurHash3_x86_32 of an empty input with seed 1.
    assert (literal_murmur3(0), literal_murmur3(1)) == (0, 0x514E28B7)
    rate, seed, stream0, head0 = 0.3, 2**32 - 1, 5, 7
    dropout = AttentionDropout(rate, jnp.uint32(seed), stream0, head0)
    expected = np.zeros((B, H, L, K), bool)
    for b, h, i, j in np.ndindex(B, H, L, K):
        start = seed
        for index in (stream0 + b, head0 + h, i):
            start = literal_murmur3(start ^ index)
        counter = (start + j * 0x9E3779B9) % 2**32
        expected[b, h, i, j] = literal_murmur3(counter) >= rate * 2**32
    assert 0 < expected.mean() < 1
    actual = jax.jit(lambda: keep_BHLK(dropout, (B, H, L, K)))()
    np.testing.assert_array_equal(actual, expected)
    inputs = CASE.inputs()
    o_BLHA = literal_attention(inputs, keep_BHLK=expected, rate=rate)
    assert_close(attend(inputs, dropout), o_BLHA)


@pytest.mark.parametrize(
    "kernel",
    [
        rel_attention,
        chunked.rel_attention,
        functools.partial(cudnn.rel_attention, implementation="xla"),
    ],
    ids=["xla", "chunked", "cudnn"],
)
def test_gradients_of_the_farthest_distance_are_summed_in_float32(
    kernel: Kernel,
) -> None:
    """246 of 336 keys share the farthest of 90 distances."""
    shape, absent, name = (
        (2, 2, 136, 200, 64, 90),
        ("bias_HR",),
        "the gradient of r_RHA",
    )
    actual, expected = (
        differentiate(each, make_operands(shape, dtype, absent, rate=0))
        for each, dtype in ((kernel, "bfloat16"), (rel_attention, "float32"))
    )
    assert errors(actual, expected)[name] < 0.01
