"""Every token but the first is scored once, whatever the batch, segment and order.

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
    of_stream,
    positions,
    positions_of,
    read_epoch,
    real,
)
from txl_jax.data.options import SLACK
from txl_jax.data.streams import (
    ROTATION,
    SHORTEST,
    Position,
    Streams,
    random_bits,
    splitmix64,
)
from txl_jax.model.segment import Segment


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
        assert 0 <= read.inputs_SBL.min() and read.targets_SBL.max() < N
        assert read.length_SB[-1].max() > 0, "no segment is all padding"


def reference(
    streams: Streams, position: Position, b: int
) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """Returns a stream's inputs, targets, scored and first tokens, without padding."""
    N, B, ext_len = len(streams.tokens), streams.batch_size, streams.ext_len
    index = np.arange(N)
    if streams.shuffled:
        index = streams.shuffled.locate(position.epoch, index)
    text = streams.tokens[index].tolist()
    begin, end = (n * (N - 1) // B for n in (b, b + 1))
    start = max(begin - streams.warm_tokens, 0)
    # Unscored pairs precede the scored ones: as context, or as segments.
    warm, new = [*range(start, begin)], [*range(begin, end)]
    if not ext_len:
        warm, new = [], warm + new
    starts = {(warm + new)[0]}
    if streams.roll:
        turn = random_bits(streams.seed, ROTATION, position.epoch, b) % len(new)
        new = new[turn:] + new[:turn]
        starts = {new[0], min(new)}
    offset, length = position.token_offset, streams.length(position)
    read = new[offset : offset + length]
    context = (warm + new[:offset])[-ext_len:] if ext_len and read else []
    pairs = context + read
    scored = [
        number >= len(context)
        and pair >= begin
        and text[pair + 1] >= streams.score_from
        and (number >= len(pairs) // 2 or not streams.half_loss)
        for number, pair in enumerate(pairs)
    ]
    first = [pair in starts or text[pair] == streams.reset_memory_at for pair in pairs]
    return [text[x] for x in pairs], [text[x + 1] for x in pairs], scored, first


OTHERS: list[dict[str, Any]] = [
    {"warm_tokens": 3, "reset_memory_at": 7},
    {"warm_tokens": 1000},
    {"half_loss": True, "varlen": True},
    {"score_from": 110},
]


@pytest.mark.parametrize("kind", KINDS + OTHERS, ids=str)
@pytest.mark.parametrize("ext_len", [0, 5, 1000])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_streams_agree_with_a_slow_reference(
    N: int, B: int, L: int, ext_len: int, kind: dict[str, Any]
) -> None:
    streams = make(N, B, L, ext_len=ext_len, **kind)
    for position in [*positions_of(streams, 0), *positions_of(streams, 3)]:
        segment, _ = streams.batch(position)
        assert not segment.weights_SBL[~real(segment)].any()
        assert not segment.first_SBL[~real(segment)].any()
        for b in range(B):
            for array, expected in zip(
                segment[:4], reference(streams, position, b), strict=True
            ):
                assert of_stream(array, segment, b).tolist() == expected


def test_segments_have_the_documented_shapes_and_dtypes() -> None:
    bytes_of_text = np.frombuffer(b"some text, as bytes", np.uint8)
    segment, _ = Streams(bytes_of_text, 3, 4).batch(Position(), 2)
    shapes = [(array.shape, array.dtype.name) for array in segment]
    types = ("int32", "int32", "float32", "bool")
    assert shapes == [*(((2, 3, 4), name) for name in types), ((2, 3), "int32")]
    assert bytes(segment.inputs_SBL[0, 0].tolist()) == b"some"
    assert bytes(segment.targets_SBL[0, 0].tolist()) == b"ome "


@pytest.mark.parametrize("more", [{}, {"warm_tokens": 7}, {"ext_len": 7}])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batches_depend_only_on_the_position(
    kind: dict[str, Any], more: dict[str, Any]
) -> None:
    """They do not depend on S, rows or earlier batches, so runs resume on any mesh."""
    S, sizes = 3, (201, 6, 8)
    kind = kind | more
    streams = make(*sizes, **kind)
    position = Position()
    while position.epoch < 2:
        expected, after = streams.batch(position, S)
        for rows in (slice(0, 2), slice(2, 6)):
            result, same = make(*sizes, rows=rows, **kind).batch(position, S)
            assert_same(result, Segment(*(array[:, rows] for array in expected)))
            assert same == after
        at, parts = position, []
        for _ in range(S):
            segment, at = streams.batch(at)
            parts.append(segment)
        assert_same(joined(parts), expected)
        assert at == after and [type(number) for number in at] == [int] * 3
        assert Position(**json.loads(json.dumps(at._asdict()))) == at
        position = after


@pytest.mark.parametrize("B", [1, 2])
def test_offsets_beyond_int32(tmp_path: Path, B: int) -> None:
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


def test_draw_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 from state 1234567.
    state = 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64((state + n * gamma) % 2**64) for n in (1, 2, 3)] == known
    # Later versions must draw the same numbers.
    assert random_bits(1111, 1, 2, 3) == int(
        random_bits(1111, 1, 2, np.array([3], np.uint64))[0]
    )
    assert random_bits(1111, 1, 2, 3) == 16703943413597834143


def test_varying_lengths_follow_the_original_code() -> None:
    streams = Streams(positions(2), 1, 150, varlen=True, seed=3)
    lengths = np.array([streams.length(Position(2, s)) for s in range(10_000)])
    assert lengths.min() >= SHORTEST and lengths.max() <= 150 + SLACK
    short = lengths < 115
    assert abs(short.mean() - 0.05) < 4 * (0.05 * 0.95 / 10_000) ** 0.5
    for part, about in ((lengths[short], 75), (lengths[~short], 150)):
        assert abs(part.mean() - about) < 4 * 5 / len(part) ** 0.5
        assert abs(part.std() - 5) < 0.5
    drawn = {
        Streams(positions(2), 1, 8, varlen=True).length(Position(0, s))
        for s in range(2_000)
    }
    assert min(drawn) == SHORTEST and max(drawn) <= 8 + SLACK
    again = Streams(positions(2), 1, 150, varlen=True, seed=4)
    for other, epoch in ((streams, 3), (again, 2)):
        drawn = {other.length(Position(epoch, s)) for s in range(20)}
        assert drawn != set(lengths[:20].tolist()), "epochs and seeds differ"
