"""Streams read what a literal transcription of their definition reads.

Dims: B streams, L segment.
"""

from typing import Any

import numpy as np
import pytest

from tests.data.reading import KINDS, SIZES, make, of_stream, positions_of, real
from txl_jax.data.streams import ROTATION, Position, Streams, draw


def reference(
    streams: Streams, position: Position, b: int
) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """Returns the inputs, targets, scored and first of a stream, without padding."""
    N, B, ext_len = len(streams.tokens), streams.batch_size, streams.ext_len
    text = streams.tokens[streams.order(position.epoch, np.arange(N))].tolist()
    begin, end = (n * (N - 1) // B for n in (b, b + 1))
    start = max(begin - streams.warm_tokens, 0)
    # Before the scored pairs come unscored ones: as context, or as segments.
    warm, new = [*range(start, begin)], [*range(begin, end)]
    if not ext_len:
        warm, new = [], warm + new
    starts = {(warm + new)[0]}
    if streams.roll:
        turn = draw(streams.seed, ROTATION, position.epoch, b) % len(new)
        new = new[turn:] + new[:turn]
        starts = {new[0], min(new)}
    offset, length = position.token_offset, streams.length(position)
    read = new[offset : offset + length]
    context = (warm + new[:offset])[-ext_len:] if ext_len and read else []
    pairs = context + read
    scored = [
        number >= len(context)
        and pair >= begin
        and text[pair + 1] >= streams.score_ids_from
        and (number >= len(pairs) // 2 or not streams.half_loss)
        for number, pair in enumerate(pairs)
    ]
    first = [
        pair in starts or (pair > 0 and text[pair - 1] == streams.reset_memory_at)
        for pair in pairs
    ]
    return [text[x] for x in pairs], [text[x + 1] for x in pairs], scored, first


OTHERS: list[dict[str, Any]] = [
    {"warm_tokens": 3, "reset_memory_at": 7},
    {"warm_tokens": 1000},
    {"half_loss": True, "varlen": True},
    {"score_ids_from": 110},
]


@pytest.mark.parametrize("kind", KINDS + OTHERS, ids=str)
@pytest.mark.parametrize("ext_len", [0, 5, 1000])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_streams_read_as_the_reference(
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


@pytest.mark.parametrize("warm_tokens", [0, 3, 1000])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_tokens_with_a_short_context_are_counted(
    N: int, B: int, L: int, warm_tokens: int
) -> None:
    begins = [b * (N - 1) // B for b in range(B + 1)]
    cold = 0
    for begin, end in zip(begins, begins[1:], strict=False):
        start = max(begin - warm_tokens, 0)
        cold += sum(pair - start < 20 for pair in range(begin, end))
    assert make(N, B, L, warm_tokens=warm_tokens).cold_tokens(20) == cold
