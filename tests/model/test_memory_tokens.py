"""Memory tokens: their equations, gradients through them, and what they let through.

Dims: S segments, B streams, L segment, W memory tokens, G segments that a gradient
crosses.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.reference import Array, Params
from tests.support import tiny
from tests.support.reference_tokens import Stream
from txl_jax.model import calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.options import TrainConfig
from txl_jax.update.step import sum_gradients

B, L, S, W, G = 3, 4, 6, 2, 2
CONFIG = tiny.config(mem_len=3, memory_tokens=W)
TOKENS_SBL, TARGETS_SBL = tiny.make_tokens(2 * S * B, L).reshape(2, S, B, L)
# The first stream has no document and no padding. A document starts with a segment,
# inside one, and in one that ends in padding.
FIRST_SBL = np.zeros((S, B, L), bool)
FIRST_SBL[2, 1, 0] = FIRST_SBL[4, 1, 2] = FIRST_SBL[3, 2, 1] = True
LENGTH_SB = np.full((S, B), L, np.int32)
LENGTH_SB[:5, 2] = 1, 3, 0, 2, 0


def streams(config: ModelConfig, params: Params) -> list[Stream]:
    """Returns the oracle's streams."""
    settings = tiny.reference_settings(config)
    return [Stream(params, **settings) for _ in range(B)]


def read(
    config: ModelConfig, params: Params, tokens_SBL: Array, memory: Any = None
) -> tuple[list[Array], Any]:
    """Returns the hidden states of the segments, and the memory after them."""
    memory, pieces = memory or choose_kind(config).empty(B), []
    for tokens_BL, first_BL, length_B in zip(
        tokens_SBL, FIRST_SBL, LENGTH_SB, strict=True
    ):
        hidden_BLD, memory = tiny.apply(
            config, params, tokens_BL, memory, first_BL=first_BL, length_B=length_B
        )
        pieces.append(np.asarray(hidden_BLD))
    return pieces, memory


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        tiny.config(
            mem_len=0, memory_tokens=3, position="rotary", d_head=4, **tiny.MODERN
        ),
        *(
            pytest.param(dataclasses.replace(CONFIG, **more), marks=pytest.mark.long)
            for more in (
                {"kernel": "chunked"},
                {"dtype": "bfloat16"},
                {"position": "alibi", "clamp_len": 5, "memory_tokens": 7},
            )
        ),
    ],
    ids=lambda x: f"{x.mem_len} {x.position} {x.kernel} {x.dtype}",
)  # fmt: skip
def test_segments_match_the_transcription(config: ModelConfig) -> None:
    params = tiny.make_params(config)
    # The tokens pass rounding errors from segment to segment.
    tolerance = 2 * tiny.BFLOAT16 if config.dtype == "bfloat16" else tiny.FLOAT32
    hidden, memory = read(config, params, TOKENS_SBL)
    for b, stream in enumerate(streams(config, params)):
        for s, length in enumerate(LENGTH_SB[:, b]):
            if length:
                real = s, b, slice(length)
                expected_LD = stream.read(TOKENS_SBL[real], FIRST_SBL[real])
                tiny.assert_close(hidden[s][b, :length], expected_LD, tolerance)
        tiny.assert_close(memory.tokens_BWD[b], stream.tokens_WD, tolerance)
        assert memory.filled_B[b] == len(stream.text[0])


def test_several_segments_in_a_call_are_read_one_by_one() -> None:
    params = tiny.make_params(CONFIG)
    length_B = LENGTH_SB[:2].sum(0)
    length_B[2] = L + 3  # padding is at the end of a call
    join = functools.partial(np.concatenate, axis=1)
    joined_BTD, after = tiny.apply(
        CONFIG, params, join(TOKENS_SBL[:2]), choose_kind(CONFIG).empty(B),
        first_BL=join(FIRST_SBL[2:4]), length_B=length_B, segment_len=L,
        method=calls.read_segments,
    )  # fmt: skip
    memory, pieces = choose_kind(CONFIG).empty(B), []
    for s in range(2):
        hidden_BLD, memory = tiny.apply(
            CONFIG, params, TOKENS_SBL[s], memory,
            first_BL=FIRST_SBL[2 + s], length_B=np.clip(length_B - s * L, 0, L),
        )  # fmt: skip
        pieces.append(hidden_BLD)
    tiny.assert_close(joined_BTD, join(pieces))
    tiny.assert_close(after, memory)


def test_documents_and_padding_leak_nothing() -> None:
    """No bit after a document's start depends on earlier tokens or on padding."""
    params = tiny.make_params(CONFIG)
    one, (two, three) = TOKENS_SBL, (TOKENS_SBL.copy(), TOKENS_SBL.copy())
    two[:2, 1], three[:4, 1], three[4, 1, :2] = 7, 7, 7
    two[:3, 2], two[3, 2, 0] = 5, 5
    for s, b in zip(*np.nonzero(LENGTH_SB < L), strict=True):
        three[s, b, LENGTH_SB[s, b] :] = 9
    results = [read(CONFIG, params, tokens_SBL) for tokens_SBL in (one, two, three)]
    expected = results[0][0]
    assert np.any(results[2][0][3][1] != expected[3][1]), "the memory has an effect"
    for hidden, later in ((results[1][0], [2]), (results[2][0], [])):
        for s in later:
            np.testing.assert_array_equal(hidden[s][1], expected[s][1])
        np.testing.assert_array_equal(hidden[4][1, 2:], expected[4][1, 2:])
        np.testing.assert_array_equal(hidden[5][1:], expected[5][1:])
    np.testing.assert_array_equal(results[1][0][3][2, 1:2], expected[3][2, 1:2])
    for _, memory in results[1:]:
        np.testing.assert_array_equal(
            memory.tokens_BWD[1:], results[0][1].tokens_BWD[1:]
        )


def test_gradients_cross_as_many_segments_as_are_set() -> None:
    """In the oracle's differences, the memory before each G segments is constant."""
    params: Params = tiny.make_params(CONFIG)
    params = jax.tree.map(lambda x: x.astype(np.float64), params)
    shape = 2 * G, B, L
    segments = Segment(
        inputs_SBL=TOKENS_SBL[: 2 * G],
        targets_SBL=TARGETS_SBL[: 2 * G],
        weights_SBL=np.ones(shape, np.float32),
        first_SBL=FIRST_SBL[: 2 * G],
        length_SB=np.full(shape[:2], L, np.int32),
    )
    train = TrainConfig(
        batch_size=B,
        tgt_len=L,
        segments_per_call=2 * G,
        segments_per_update=2 * G,
        gradient_segments=G,
    )
    find = functools.partial(sum_gradients, TransformerXL(CONFIG), config=train)
    given = params, choose_kind(CONFIG).empty(B), segments, jax.random.key(0)
    sums, _ = jax.jit(find)(*given)

    # The streams before each segment; only their memory tokens are not constant.
    before: list[list[Stream]] = []
    ready, total = streams(CONFIG, params), 0.0
    for s in range(2 * G):
        before.append([*map(copy.copy, ready)])
        for b, stream in enumerate(ready):
            read = TOKENS_SBL[s, b], TARGETS_SBL[s, b], FIRST_SBL[s, b]
            total += stream.nll(*read).sum()
    assert float(sums.nll) == pytest.approx(total, rel=tiny.FLOAT32)

    def loss(changed: Params) -> float:
        total = 0.0
        for s in range(2 * G):
            if s % G == 0:
                tokens = [stream.tokens_WD for stream in before[s]]
            for b, stream in enumerate(map(copy.copy, before[s])):
                stream.params, stream.tokens_WD = changed, tokens[b]
                read = TOKENS_SBL[s, b], TARGETS_SBL[s, b], FIRST_SBL[s, b]
                total += stream.nll(*read).sum()
                tokens[b] = stream.tokens_WD
        return total

    attention = params["layers"]["attention"], sums.grads["layers"]["attention"]
    pairs = [(params["memory_tokens"], sums.grads["memory_tokens"])]
    pairs += [(attention[0][name], attention[1][name]) for name in "kv"]
    for leaf, grad in pairs:
        steepest = np.unravel_index(np.abs(grad).argmax(), grad.shape)
        sides = []
        for step in (1e-6, -1e-6):
            leaf[steepest] += step
            sides.append(loss(params))
            leaf[steepest] -= step
        slope = (sides[0] - sides[1]) / 2e-6
        assert float(grad[steepest]) == pytest.approx(slope, rel=1e-4)
