"""The reach of a memory matches masks and gradients.

Dims: N layers, L segment, M memory, T tokens of a text.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from experiments.figures.reach import effective_context
from tests.reference import Array
from tests.support import tiny
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL


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
    assert effective_context(config, L) == expected
    if M % L == 0:
        assert expected == N * M  # the paper's O(N x L), exactly
    for itself in (False, True):
        config = dataclasses.replace(config, same_length=True, same_length_self=itself)
        expected = reach_by_masks(np.maximum(oldest_NT, query_T + 1 - M - itself), L)
        assert effective_context(config, L) == expected


def test_the_reach_of_fast_weights_has_no_limit() -> None:
    assert effective_context(tiny.config(mem_len=7, **tiny.FAST), 5) == math.inf


@pytest.mark.parametrize("M, L", [(4, 3), (4, 4)])
def test_gradients_reach_as_far_as_the_masks(M: int, L: int) -> None:
    """A call of several segments has gradients of tokens, which occur once each.

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
    oldest = T - L - effective_context(config, L)
    assert 0 < oldest < start
    for b, begin in enumerate((oldest, start)):
        key_T, query_L1 = np.arange(T), np.arange(T - L, T)[:, None]
        expected_LT = (key_T >= begin) & (key_T <= query_L1)
        of_stream = depends_BLV.reshape(2, L, 2, T)[b]
        np.testing.assert_array_equal(of_stream[:, b], expected_LT)
        assert not of_stream[:, 1 - b].any()
