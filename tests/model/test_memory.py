"""The memory keeps the newest real tokens, and queries see what they may see.

Dims: N layers, B streams, M memory, L segment, K = M + L, D model.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.reference import Array
from tests.support import tiny
from txl_jax.model.memory import Memory, find_oldest

B, D, N = 3, tiny.D, tiny.N
SEGMENTS = 5


def make_inputs(L: int, seed: int) -> Array:
    """Returns the layers' inputs h_NBLD, no two numbers alike."""
    return np.random.default_rng(seed).normal(size=(N, B, L, D)).astype(np.float32)


@pytest.mark.parametrize("starts", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
@pytest.mark.parametrize(("L", "M"), [(2, 5), (5, 2), (3, 0)])
def test_append_keeps_the_newest_real_tokens(
    L: int, M: int, ragged: bool, starts: bool
) -> None:
    rng = np.random.default_rng(L)
    memory = Memory.empty(tiny.config(mem_len=M), B)
    append = tiny.jit(Memory.append)
    history: list[list[Any]] = [[np.zeros((N, D))] * M for _ in range(B)]
    since = [0] * B
    for s in range(SEGMENTS):
        h_NBLD = make_inputs(L, s)
        # Streams take turns at being full, partly padded and absent.
        length_B = np.array([L, (s + 1) % (L + 1), 0 if s % 2 else L], np.int32)
        length_B = length_B if ragged else np.full(B, L, np.int32)
        first_BL = starts & (rng.random((B, L)) < 0.3)
        memory = append(
            memory,
            h_NBLD,
            length_B if ragged else None,
            first_BL if starts else None,
        )
        for b in range(B):
            for i in range(length_B[b]):
                history[b].append(h_NBLD[:, b, i])
                since[b] = 1 if first_BL[b, i] else since[b] + 1
        expected_BMND = [tokens[len(tokens) - M :] for tokens in history]
        expected_NBMD = np.zeros((N, B, 0, D))
        if M:
            expected_NBMD = np.moveaxis(np.array(expected_BMND), 2, 0)
        np.testing.assert_array_equal(memory.h_NBMD, expected_NBMD)
        np.testing.assert_array_equal(memory.filled_B, np.minimum(since, M))


def test_reset_hides_everything_in_some_streams() -> None:
    memory = Memory(jnp.asarray(make_inputs(4, 0)), jnp.array([4, 3, 1]))
    after = memory.reset(jnp.array([False, True, False]))
    np.testing.assert_array_equal(after.filled_B, [4, 0, 1])
    np.testing.assert_array_equal(after.h_NBMD, memory.h_NBMD)
    # What comes next is seen, and nothing of what was.
    later = after.append(jnp.asarray(make_inputs(2, 1)))
    np.testing.assert_array_equal(later.filled_B, [4, 2, 3])


@pytest.mark.parametrize(
    ("L", "M", "same_length"),
    # ModelConfig refuses same_length without a memory.
    [(L, M, same) for L in (1, 2, 4) for M in (0, 1, 3) for same in {False, M > 0}],
)
def test_oldest_is_the_first_visible_key(L: int, M: int, same_length: bool) -> None:
    """For every fill of the memory and every set of document starts: one stream each.

    The oracle's memory has no slots that may not be seen: its keys start at M - filled.
    """
    cases = list(
        itertools.product(range(M + 1), itertools.product([False, True], repeat=L))
    )
    filled_B = jnp.array([filled for filled, _ in cases])
    first_BL = jnp.array([first for _, first in cases])
    oldest = np.asarray(find_oldest(filled_B, first_BL, M, L, M if same_length else 0))
    assert oldest.dtype == np.int32
    for b, (filled, first) in enumerate(cases):
        document_K = [0] * filled + [int(number) for number in np.cumsum(first)]
        for i in range(L):
            keys = reference.visible_keys(
                filled + i, document_K, M if same_length else 0
            )
            visible = list(range(oldest[b, i], i + M + 1))
            assert visible == [key + M - filled for key in keys], (filled, first, i)


def test_zeros_are_seen_from_the_start_and_from_a_document_on() -> None:
    """As in TensorFlow and Hugging Face: M keys of zero, which the softmax counts."""
    empty = tiny.config(mem_len=3)
    zeros = tiny.config(mem_len=3, initial_memory="zeros")
    params, tokens_BL = tiny.make_params(), tiny.make_tokens(2, 4)
    filled = Memory.empty(zeros, 2)
    np.testing.assert_array_equal(filled.filled_B, [3, 3])
    fresh_BLD, after = tiny.apply(zeros, params, tokens_BL, filled)
    np.testing.assert_array_equal(after.filled_B, [3, 3])
    unseen_BLD, _ = tiny.apply(empty, params, tokens_BL, Memory.empty(empty, 2))
    assert (np.abs(np.asarray(fresh_BLD) - unseen_BLD).max(axis=(1, 2)) > 0.01).all()
    first_BL = np.zeros((2, 4), bool)
    first_BL[1, 0] = True
    again_BLD, memory = tiny.apply(zeros, params, tokens_BL, after, first_BL=first_BL)
    going_on_BLD, _ = tiny.apply(zeros, params, tokens_BL, after)
    tiny.assert_close(again_BLD[1], fresh_BLD[1])
    tiny.assert_close(again_BLD[0], going_on_BLD[0])
    tiny.assert_close(memory.h_NBMD[:, 1], after.h_NBMD[:, 1])
    np.testing.assert_array_equal(memory.filled_B, [3, 3])
