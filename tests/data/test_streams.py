"""Every token but the first is scored once, in order, whatever the batch and segment.

The tokens here are their own positions, so that a segment shows where it was read.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.data.streams import Position, Segment, Streams

# (N tokens, B streams, L segment)
SIZES = [
    (2, 1, 1),
    (2, 1, 5),  # a segment longer than everything
    (5, 4, 1),  # one pair each: N - 1 = B
    (5, 4, 3),
    (17, 1, 4),
    (17, 1, 5),  # a ragged last segment
    (17, 4, 4),  # streams of one full segment each
    (17, 4, 16),
    (18, 4, 2),  # N - 1 = 17 does not divide over 4
    (20, 4, 5),
    (100, 7, 3),
    (101, 8, 13),
    (1000, 24, 16),
]


def positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def epoch(streams: Streams) -> Segment:
    """Returns all segments of an epoch in one Segment, S as long as it takes."""
    return Segment(*map(np.concatenate, zip(*streams.epoch(), strict=True)))


def of_stream(array_SBL: np.ndarray, b: int) -> np.ndarray:
    return array_SBL[:, b].ravel()


def assert_same(got: Segment, expected: Segment) -> None:
    for name, left, right in zip(Segment._fields, got, expected, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert left.dtype == right.dtype, name


@pytest.mark.promise("Every token is scored once")
@pytest.mark.parametrize("N, B, L", SIZES)
def test_every_token_but_the_first_is_scored_once(N: int, B: int, L: int) -> None:
    read = epoch(Streams(positions(N), B, L))
    scored = read.weights_SBL == 1
    np.testing.assert_array_equal(np.sort(read.targets_SBL[scored]), positions(N)[1:])
    np.testing.assert_array_equal(
        read.inputs_SBL[scored], read.targets_SBL[scored] - 1, "a pair is neighbours"
    )


@pytest.mark.parametrize("N, B, L", SIZES)
def test_streams_are_contiguous_and_join_over_the_split(N: int, B: int, L: int) -> None:
    read = epoch(Streams(positions(N), B, L))
    lengths = []
    end = 0
    for b in range(B):
        scored = of_stream(read.weights_SBL, b) == 1
        targets = of_stream(read.targets_SBL, b)[scored]
        np.testing.assert_array_equal(targets, np.arange(end + 1, targets[-1] + 1))
        assert read.inputs_SBL[0, b, 0] == end, "the last token of the stream before"
        end = targets[-1]
        lengths.append(len(targets))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("N, B, L", SIZES)
def test_padding_is_at_the_right_end_and_weighs_nothing(N: int, B: int, L: int) -> None:
    read = epoch(Streams(positions(N), B, L))
    real_SBL = np.arange(L) < read.length_SB[..., None]
    np.testing.assert_array_equal(read.weights_SBL, real_SBL)
    assert 0 <= read.inputs_SBL.min() and read.targets_SBL.max() < N
    assert (read.length_SB[:-1] == L).all(), "all but the last are full"
    assert read.length_SB[-1].max() > 0


def test_segments_have_the_promised_shapes_and_dtypes() -> None:
    bytes_of_text = np.frombuffer(b"some text, as bytes", np.uint8)
    segment, _ = Streams(bytes_of_text, 3, 4, segments=2).batch(Position())
    shapes = [(array.shape, array.dtype.name) for array in segment]
    assert shapes == [
        ((2, 3, 4), "int32"),
        ((2, 3, 4), "int32"),
        ((2, 3, 4), "float32"),
        ((2, 3, 4), "bool"),
        ((2, 3), "int32"),
    ]
    assert bytes(segment.inputs_SBL[0, 0].tolist()) == b"some"
    assert bytes(segment.targets_SBL[0, 0].tolist()) == b"ome "


def test_batch_is_pure() -> None:
    streams = Streams(positions(100), 4, 5)
    position = Position(0, 2, 10)
    first, after = streams.batch(position)
    streams.batch(after)
    list(streams.epoch())
    again, same = streams.batch(position)
    assert_same(again, first)
    assert same == after == Position(0, 3, 15)
    assert position == Position(0, 2, 10)


@pytest.mark.parametrize("S", [2, 3, 7])
def test_several_segments_in_one_call_are_several_calls(S: int) -> None:
    one = Streams(positions(100), 4, 5)  # five segments to an epoch
    at = at_once = Position()
    for _ in range(3):
        parts = []
        for _ in range(S):
            segment, at = one.batch(at)
            parts.append(segment)
        joined = Segment(*map(np.concatenate, zip(*parts, strict=True)))
        together, at_once = Streams(positions(100), 4, 5, S).batch(at_once)
        assert_same(together, joined)
        assert at_once == at


def test_epochs_follow_each_other_and_start_a_document() -> None:
    streams = Streams(positions(100), 4, 5, segments=12)
    read, position = streams.batch(Position())
    assert streams.segments_per_epoch == 5
    assert position == Position(epoch=2, segment=2, token_offset=10)
    starts = np.zeros((12, 4, 5), bool)
    starts[[0, 5, 10], :, 0] = True
    np.testing.assert_array_equal(read.first_SBL, starts)
    for array_SBL in (read.inputs_SBL, read.weights_SBL, read.length_SB):
        np.testing.assert_array_equal(array_SBL[5:10], array_SBL[:5])


def test_epoch_yields_each_segment_once() -> None:
    streams = Streams(positions(100), 4, 5, segments=3)
    parts = list(streams.epoch())
    assert len(parts) == streams.segments_per_epoch == 5
    position = Position()
    one = Streams(positions(100), 4, 5)
    for part in parts:
        expected, position = one.batch(position)
        assert_same(part, expected)
    assert position == Position(epoch=1)


def test_position_is_python_integers_and_survives_json() -> None:
    position = Position()
    streams = Streams(positions(50).astype(np.uint8), 3, 4, segments=3)
    for _ in range(7):
        _, position = streams.batch(position)
        assert [type(number) for number in position] == [int] * 3
        assert Position(**json.loads(json.dumps(position._asdict()))) == position
    assert position.epoch > 0


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 6), slice(5, 6)])
@pytest.mark.parametrize("warm_tokens", [0, 7])
def test_rows_are_those_of_the_whole(rows: slice, warm_tokens: int) -> None:
    whole = Streams(positions(100), 6, 5, 8, warm_tokens=warm_tokens)
    part = Streams(positions(100), 6, 5, 8, rows=rows, warm_tokens=warm_tokens)
    expected, after = whole.batch(Position())
    got, position = part.batch(Position())
    assert_same(got, Segment(*(array[:, rows] for array in expected)))
    assert position == after


@pytest.mark.parametrize("warm_tokens", [1, 3, 8, 1000])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_warm_tokens_precede_what_is_scored(
    N: int, B: int, L: int, warm_tokens: int
) -> None:
    cold = epoch(Streams(positions(N), B, L))
    warm = epoch(Streams(positions(N), B, L, warm_tokens=warm_tokens))
    for b in range(B):
        scored_cold = of_stream(cold.weights_SBL, b) == 1
        scored_warm = of_stream(warm.weights_SBL, b) == 1
        inputs = of_stream(cold.inputs_SBL, b)[scored_cold]
        real = (np.arange(L) < warm.length_SB[:, b, None]).ravel()
        read = of_stream(warm.inputs_SBL, b)[real]
        begin = max(inputs[0] - warm_tokens, 0)
        np.testing.assert_array_equal(read, np.arange(begin, inputs[-1] + 1))
        np.testing.assert_array_equal(of_stream(warm.targets_SBL, b)[real], read + 1)
        np.testing.assert_array_equal(
            of_stream(warm.inputs_SBL, b)[scored_warm], inputs, "the same are scored"
        )
    assert warm.first_SBL.sum() == B and warm.first_SBL[0, :, 0].all()
    assert warm.length_SB[-1].max() > 0, "no segment is all padding"


@pytest.mark.parametrize("warm_tokens", [0, 2, 5, 1000])
@pytest.mark.parametrize("mem_len", [0, 1, 4, 20])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_cold_tokens_are_counted(
    N: int, B: int, L: int, mem_len: int, warm_tokens: int
) -> None:
    streams = Streams(positions(N), B, L, warm_tokens=warm_tokens)
    read = epoch(streams)
    expected = 0
    for b in range(B):
        before = 0  # tokens that the stream has read before this one
        real = (np.arange(L) < read.length_SB[:, b, None]).ravel()
        for weight in of_stream(read.weights_SBL, b)[real]:
            expected += int(weight == 1 and before < mem_len)
            before += 1
    assert streams.cold_tokens(mem_len) == expected


@pytest.mark.parametrize("N, B", [(0, 1), (1, 1), (4, 4), (24, 24)])
def test_too_few_tokens_are_refused(N: int, B: int) -> None:
    message = f"{N} tokens are too few for {B} streams"
    with refused(message):
        Streams(positions(N), B, 4)


@pytest.mark.parametrize("B", [1, 2])
def test_offsets_pass_two_to_the_31(tmp_path: Path, B: int) -> None:
    N, L = 3 * 2**30, 1000
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.seek(N - 4)
        file.write(b"\x01\x02\x03\x04")
    streams = Streams(np.memmap(path, np.uint8, "r"), B, L)
    last = streams.segments_per_epoch - 1
    segment, position = streams.batch(Position(0, last, last * L))
    assert (B * last + 1) * L > 2**31
    length = int(segment.length_SB[0, -1])
    assert segment.inputs_SBL[0, -1, length - 4 : length].tolist() == [0, 1, 2, 3]
    assert segment.targets_SBL[0, -1, length - 4 : length].tolist() == [1, 2, 3, 4]
    assert segment.weights_SBL[0, -1].sum() == length
    assert position == Position(epoch=1)
