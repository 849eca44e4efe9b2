"""The size and the reach of a memory match arrays and masks.

Dims: N layers, L segment, M memory, T tokens of a text.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.metrics import parameter_count
from txl_jax.model import reach
from txl_jax.model.memory import Memory
from txl_jax.model.memory.compressive import CompressiveMemory
from txl_jax.model.memory.key_values import KeyValueMemory
from txl_jax.model.memory.kinds import empty_memory
from txl_jax.model.memory.layout import unstack
from txl_jax.model.memory.memory_tokens import TokenMemory
from txl_jax.model.txl import TransformerXL


def test_accounted_bytes_match_the_arrays() -> None:
    config = tiny.config(mem_len=7, dtype="bfloat16")
    counts = reach.account(config, 3, 5)
    memory = Memory.empty(config, 3)
    assert counts["cache_bytes"] == memory.h_NBMD.nbytes
    params = unstack(tiny.make_params(config))
    for S in (1, 4):
        kept = jax.eval_shape(
            lambda S=S: KeyValueMemory.empty(config, params, 3, 5 * S)
        )
        arrays = [(layer.k_HBKA, layer.v_HBKA) for layer in kept.layers]
        key_value_bytes = reach.account(config, 3, 5, S)["key_value_bytes"]
        assert key_value_bytes == 2 * parameter_count(arrays)
    assert counts["lost_without_memory"] == reach.lost_share(17, 5)
    assert "it reaches 17 tokens back" in reach.describe(config, 3, 5)
    same = tiny.config(mem_len=7, dtype="bfloat16", **tiny.SAME)
    endless = {"effective_context_tokens": None, "lost_without_memory": 1.0}
    assert reach.account(same, 3, 5) == counts | endless
    assert "it reaches all tokens before" in reach.describe(same, 3, 5)


def test_a_compressed_memory_is_accounted() -> None:
    config = tiny.config(mem_len=4, compressed_len=3, compression_rate=2)
    counts = reach.account(config, 3, 4)
    memory = CompressiveMemory.empty(config, 3)
    assert counts["cache_bytes"] == memory.h_NBMD.nbytes
    assert counts["key_value_bytes"] == memory.h_NBMD.nbytes
    assert "2 layers x 8 slots x 8 x 3 streams" in reach.describe(config, 3, 4)
    # Every query sees 4 + 3 x 2 tokens before its segment of 4, and 12 below.
    assert counts["effective_context_tokens"] == 10 + 12


def test_memory_tokens_are_accounted() -> None:
    config = tiny.config(mem_len=0, **tiny.TOKENS)
    counts = reach.account(config, 3, 4)
    assert (
        counts["memory_token_bytes"] == TokenMemory.empty(config, 3).tokens_BWD.nbytes
    )
    assert counts["cache_bytes"] == counts["key_value_bytes"] == 0
    assert counts["effective_context_tokens"] is None
    line = reach.describe(config, 3, 4)
    assert "2 tokens that each segment writes; it reaches all tokens before" in line


def reach_by_masks(oldest_NT: Array, L: int) -> int:
    """Returns how far the first token of the last segment depends on the past.

    oldest_NT: the oldest token that each query of each layer sees.
    """
    T = oldest_NT.shape[1]
    key_T = np.arange(T)
    depends_T = key_T == T - L
    for oldest_T in oldest_NT[::-1]:
        sees_TT = (key_T >= oldest_T[:, None]) & (key_T <= key_T[:, None])
        depends_T = depends_T @ sees_TT
    return T - L - int(np.argmax(depends_T))


@pytest.mark.parametrize("N, M, L", [(3, 5, 5), (4, 8, 4), (3, 7, 3), (3, 2, 5)])
def test_the_effective_context_matches_the_masks(N: int, M: int, L: int) -> None:
    query_T = np.arange(40 * L)
    oldest_NT = np.stack([query_T // L * L - M] * N)
    config, expected = tiny.config(n_layer=N, mem_len=M), reach_by_masks(oldest_NT, L)
    assert reach.effective_context(config, L) == expected
    if M % L == 0:
        assert expected == N * M  # the paper's O(N x L), exactly
    for itself in (False, True):
        config = dataclasses.replace(config, same_length=True, same_length_self=itself)
        expected = reach_by_masks(np.maximum(oldest_NT, query_T + 1 - M - itself), L)
        assert reach.effective_context(config, L) == expected


@pytest.mark.parametrize("M, L, T, layer", [(4, 3, 11, 1), (3, 4, 9, 2), (6, 2, 4, 3)])
def test_the_reach_of_retrieval_matches_masks(
    M: int, L: int, T: int, layer: int
) -> None:
    """Here T are the tokens of the store."""
    N = 3
    query_T = np.arange(20 * L)
    oldest_NT = np.stack([query_T // L * L - M] * N)
    oldest_NT[layer - 1] = np.minimum(oldest_NT[layer - 1], query_T - T)
    config = tiny.config(
        n_layer=N, mem_len=M, retrieval_len=T, retrieval_top_k=1, retrieval_layer=layer
    )
    assert reach.effective_context(config, L) == reach_by_masks(oldest_NT, L)
    counts = reach.account(config, 3, L)
    assert counts["retrieval_bytes"] == 2 * T * tiny.H * tiny.A * 3 * 4
    memory: Any = empty_memory(config, 3)
    assert counts["retrieval_bytes"] == memory.k_BHTA.nbytes + memory.v_BHTA.nbytes
    assert f"0.0 MB of {T} tokens to retrieve; it" in reach.describe(config, 3, L)


@pytest.mark.parametrize("context", [1, 4, 6, 7, 20])
def test_the_lost_share_matches_counted_pairs(context: int) -> None:
    L, segments = 6, 50
    newer_T = np.arange(20, L * segments)
    newer_T = newer_T[: len(newer_T) // L * L]  # as many of each place in a segment
    older_Tc = newer_T[:, None] - np.arange(1, context + 1)
    lost = (older_Tc // L != newer_T[:, None] // L).mean()
    assert reach.lost_share(context, L) == pytest.approx(lost)


@pytest.mark.parametrize("M, L", [(4, 3), (4, 4)])
def test_gradients_reach_as_far_as_the_masks(M: int, L: int) -> None:
    """In a call of several segments, to a token's embedding; no token occurs twice.

    The second stream has a document that starts inside the reach.
    """
    segments, start = 6, 4 * L - 1
    T = segments * L
    config = tiny.config(vocab_size=2 * T + 1, mem_len=M, tie_weights=False)
    tokens_BT = np.arange(2 * T, dtype=np.int32).reshape(2, T)
    first_BT = np.zeros((2, T), bool)
    first_BT[1, start] = True

    def last_losses(table_VE: jax.Array, params: Any) -> jax.Array:
        embedding = {**params["embedding"], "table": table_VE}
        nll_BT, _ = TransformerXL(config).apply(
            {"params": {**params, "embedding": embedding}},
            tokens_BT,
            tokens_BT + 1,
            Memory.empty(config, 2),
            first_BL=first_BT,
            segment_len=L,
            method="nll",
        )
        return nll_BT[:, -L:]

    params = tiny.make_params(config)
    jacobian = jax.jit(jax.jacrev(last_losses))(params["embedding"]["table"], params)
    depends_BLV = (np.asarray(jacobian) != 0).any(axis=-1)[:, :, : 2 * T]
    oldest = T - L - reach.effective_context(config, L)
    assert 0 < oldest < start
    for b, begin in enumerate((oldest, start)):
        key_T, query_L1 = np.arange(T), np.arange(T - L, T)[:, None]
        expected_LT = (key_T >= begin) & (key_T <= query_L1)
        of_stream = depends_BLV.reshape(2, L, 2, T)[b]
        np.testing.assert_array_equal(of_stream[:, b], expected_LT)
        assert not of_stream[:, 1 - b].any()
