"""Every token but the first is scored once, in order, whatever the batch and segment.

The tokens here are their own positions, so that a segment shows where it was read.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.reading import (
    KINDS,
    SIZES,
    assert_same,
    joined,
    make,
    positions,
    read_epoch,
    real,
)
from tests.support.refusal import refused
from txl_jax.data.options import SLACK
from txl_jax.data.streams import Position, Segment, Streams


@pytest.mark.promise("Every token is scored once")
@pytest.mark.parametrize("kind", [{}, {"warm_tokens": 3}, {"ext_len": 5}, *KINDS[1:4]])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_every_token_but_the_first_is_scored_once(
    N: int, B: int, L: int, kind: dict[str, Any]
) -> None:
    streams = Streams(positions(N), B, L, **kind)
    parts = list(streams.epoch())
    assert len(parts) == streams.segments_per_epoch
    assert_same(joined(parts), read_epoch(streams))
    for epoch in range(3 if "roll" in kind or "varlen" in kind else 1):
        read = read_epoch(streams, epoch)
        assert "varlen" not in kind or read.inputs_SBL.shape[2] == L + SLACK
        scored = read.weights_SBL == 1
        targets, inputs = read.targets_SBL[scored], read.inputs_SBL[scored]
        np.testing.assert_array_equal(np.sort(targets), positions(N)[1:])
        np.testing.assert_array_equal(inputs, targets - 1)
        padding = ~real(read)
        assert not read.weights_SBL[padding].any()
        assert not read.first_SBL[padding].any()
        assert 0 <= read.inputs_SBL.min() and read.targets_SBL.max() < N
        assert read.length_SB[-1].max() > 0, "no segment is all padding"


def test_segments_have_the_promised_shapes_and_dtypes() -> None:
    bytes_of_text = np.frombuffer(b"some text, as bytes", np.uint8)
    segment, _ = Streams(bytes_of_text, 3, 4, segments=2).batch(Position())
    shapes = [(array.shape, array.dtype.name) for array in segment]
    types = ("int32", "int32", "float32", "bool")
    assert shapes == [*(((2, 3, 4), name) for name in types), ((2, 3), "int32")]
    assert bytes(segment.inputs_SBL[0, 0].tolist()) == b"some"
    assert bytes(segment.targets_SBL[0, 0].tolist()) == b"ome "


@pytest.mark.parametrize("more", [{}, {"warm_tokens": 7}, {"ext_len": 7}])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batches_depend_on_the_position_alone(
    kind: dict[str, Any], more: dict[str, Any]
) -> None:
    """Not on S, rows or earlier batches, so that any run resumes on any mesh."""
    S, sizes = 3, (201, 6, 8)
    kind = kind | more
    whole, one = make(*sizes, S, **kind), make(*sizes, **kind)
    position = Position()
    while position.epoch < 2:
        expected, after = whole.batch(position)
        for rows in (slice(0, 2), slice(2, 6)):
            result, same = make(*sizes, S, rows=rows, **kind).batch(position)
            assert_same(result, Segment(*(array[:, rows] for array in expected)))
            assert same == after
        at, parts = position, []
        for _ in range(S):
            segment, at = one.batch(at)
            parts.append(segment)
        assert_same(joined(parts), expected)
        assert at == after and [type(number) for number in at] == [int] * 3
        assert Position(**json.loads(json.dumps(at._asdict()))) == at
        position = after


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


@pytest.mark.parametrize("N, B", [(0, 1), (1, 1), (24, 24)])
def test_too_few_tokens_are_refused(N: int, B: int) -> None:
    with refused(f"{N} tokens are too few for {B} streams"):
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
