"""Text read again before each segment, and half losses: what is scored, and what seen.

The tokens here are their own positions, so that a segment shows where it was read.
T counts what a stream reads in an epoch, in order.
"""

from typing import Any

import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.data.options import SLACK
from txl_jax.data.sentences import ShuffledSentences
from txl_jax.data.streams import Position, Segment, Streams
from txl_jax.update.options import TrainConfig

# (N tokens, B streams, L segment)
SIZES = [
    (2, 1, 1),
    (5, 4, 1),
    (5, 4, 3),
    (17, 1, 5),
    (18, 4, 2),
    (101, 8, 13),
    (101, 8, 1),
    (997, 3, 40),
]
EXTENSIONS = [1, 2, 5, 13, 1000]
KINDS: list[dict[str, Any]] = [
    {},
    {"reset_memory_at": 7},
    {"roll": True},
    {"varlen": True},
    {"roll": True, "varlen": True, "reset_memory_at": 7},
    {"order": "sentences", "reset_memory_at": 7},
    {"order": "sentences", "varlen": True},
]


def make(N: int, *sizes: int, order: str = "stream", **kind: Any) -> Streams:
    """Returns streams over positions, of which every 11th token is a 7 instead."""
    text = np.arange(100, N + 100, dtype=np.int32)
    text[3::11] = text[-1] = 7
    if order == "sentences":
        kind["order"] = ShuffledSentences(text, 7, 5)
    return Streams(text, *sizes, seed=5, **kind)


def positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def read_epoch(streams: Streams, epoch: int) -> list[tuple[Position, Segment]]:
    """Returns where each segment of an epoch begins, and the segment."""
    position, parts = Position(epoch), []
    while position.epoch == epoch:
        segment, after = streams.batch(position)
        parts.append((position, segment))
        position = after
    return parts


def real(segment: Segment, b: int) -> list[np.ndarray]:
    """Returns inputs_L, targets_L, first_L and weights_L of a stream, not its padding.

    Padding is at the right end and neither scored nor a start.
    """
    length = segment.length_SB[0, b]
    assert not segment.weights_SBL[0, b, length:].any()
    assert not segment.first_SBL[0, b, length:].any()
    arrays = (segment.inputs_SBL, segment.targets_SBL, segment.first_SBL)
    return [array[0, b, :length] for array in (*arrays, segment.weights_SBL)]


def whole(parts: list[tuple[Position, Segment]], b: int) -> list[np.ndarray]:
    """Returns inputs_T, targets_T, first_T and weights_T of a stream's whole epoch."""
    pieces = zip(*(real(segment, b) for _, segment in parts), strict=True)
    return [np.concatenate(piece) for piece in pieces]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ext_len", EXTENSIONS)
@pytest.mark.parametrize("N, B, L", SIZES)
def test_a_segment_is_preceded_by_what_its_stream_read_last(
    N: int, B: int, L: int, ext_len: int, kind: dict[str, Any]
) -> None:
    streams = make(N, B, L, ext_len=ext_len, **kind)
    width = ext_len + L + (SLACK if "varlen" in kind else 0)
    for epoch in (0, 3):
        plain = read_epoch(make(N, B, L, **kind), epoch)
        parts = read_epoch(streams, epoch)
        assert [at for at, _ in parts] == [at for at, _ in plain]
        for b in range(B):
            read = whole(plain, b)
            for (at, segment), (_, new) in zip(parts, plain, strict=True):
                assert segment.inputs_SBL.shape == (1, B, width)
                length = int(new.length_SB[0, b])
                end = at.token_offset + length
                begin = max(at.token_offset - ext_len, 0) if length else end
                got = real(segment, b)
                for array_L, array_T in zip(got[:3], read[:3], strict=True):
                    np.testing.assert_array_equal(array_L, array_T[begin:end])
                context = end - begin - length
                expected_L = np.arange(end - begin) >= context
                np.testing.assert_array_equal(got[3], expected_L)


@pytest.mark.parametrize("kind", KINDS[:1] + KINDS[2:5], ids=str)
@pytest.mark.parametrize("ext_len", EXTENSIONS)
@pytest.mark.parametrize("N, B, L", SIZES)
def test_every_token_but_the_first_is_scored_once(
    N: int, B: int, L: int, ext_len: int, kind: dict[str, Any]
) -> None:
    streams = Streams(positions(N), B, L, ext_len=ext_len, **kind)
    parts = read_epoch(streams, 2)
    scored = [part.targets_SBL[part.weights_SBL == 1] for _, part in parts]
    np.testing.assert_array_equal(np.sort(np.concatenate(scored)), positions(N)[1:])


@pytest.mark.parametrize("warm_tokens", [0, 1, 3, 1000])
@pytest.mark.parametrize("ext_len", EXTENSIONS)
@pytest.mark.parametrize("N, B, L", SIZES)
def test_warm_tokens_are_the_first_segments_context(
    N: int, B: int, L: int, ext_len: int, warm_tokens: int
) -> None:
    streams = Streams(positions(N), B, L, ext_len=ext_len, warm_tokens=warm_tokens)
    parts, cold = list(streams.epoch()), 0
    assert streams.segments_per_epoch == len(parts)
    assert parts[-1].length_SB.max() > 0, "no segment is all padding"
    for b in range(B):
        begin, end = b * (N - 1) // B, (b + 1) * (N - 1) // B
        start = max(begin - warm_tokens, 0)
        for number, segment in enumerate(parts):
            at = begin + number * L
            stop = min(at + L, end)
            oldest = max(at - ext_len, start) if at < end else stop
            inputs_L, targets_L, first_L, weights_L = real(segment, b)
            np.testing.assert_array_equal(inputs_L, np.arange(oldest, stop))
            np.testing.assert_array_equal(targets_L, inputs_L + 1)
            np.testing.assert_array_equal(weights_L, inputs_L >= at)
            np.testing.assert_array_equal(first_L, inputs_L == start)
            cold += sum(pair - start < ext_len for pair in range(at, stop))
    assert streams.cold_tokens(ext_len) == cold


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 6), slice(5, 6)])
def test_rows_are_those_of_the_whole(rows: slice) -> None:
    more: dict[str, Any] = {"segments": 8, "ext_len": 7, "warm_tokens": 7}
    expected, after = Streams(positions(100), 6, 5, **more).batch(Position())
    got, position = Streams(positions(100), 6, 5, rows=rows, **more).batch(Position())
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_array_equal(left, right[:, rows])
    assert position == after


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("N, B, L", SIZES)
def test_half_loss_scores_the_recent_half_of_each_segment(
    N: int, B: int, L: int, kind: dict[str, Any]
) -> None:
    plain = read_epoch(make(N, B, L, **kind), 1)
    half = read_epoch(make(N, B, L, half_loss=True, **kind), 1)
    for (at, got), (same, all_of_it) in zip(half, plain, strict=True):
        assert at == same
        for b in range(B):
            length = int(all_of_it.length_SB[0, b])
            scored_L = real(got, b)[3]
            assert scored_L.tolist() == [0] * (length // 2) + [1] * -(-length // 2)
        changed = got._replace(weights_SBL=all_of_it.weights_SBL)
        for left, right in zip(changed, all_of_it, strict=True):
            np.testing.assert_array_equal(left, right)


def test_half_loss_and_overlap_together_are_refused() -> None:
    message = "train.half_loss = True and train.ext_len = 4"
    with refused(message):
        TrainConfig(half_loss=True, ext_len=4)
    with refused("train.ext_len = -1 must be at least 0"):
        TrainConfig(ext_len=-1)
