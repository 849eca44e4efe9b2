"""Overlapping segments and half losses: which tokens are scored, and which are seen.

The tokens here are their own positions, so that a segment shows where it was read.
T counts the tokens that a stream reads in an epoch, in order.
"""

from typing import Any

import numpy as np
import pytest

from tests.data.reading import (
    KINDS,
    SIZES,
    make,
    of_stream,
    positions,
    positions_of,
    read_epoch,
    real,
)
from txl_jax.data.streams import Segment, Streams

EXTENSIONS = [1, 5, 1000]


def arrays(segment: Segment, b: int) -> list[np.ndarray]:
    """Returns inputs_T, targets_T, first_T and weights_T of a stream."""
    every = segment.inputs_SBL, segment.targets_SBL, segment.first_SBL
    return [of_stream(array, segment, b) for array in (*every, segment.weights_SBL)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ext_len", EXTENSIONS)
@pytest.mark.parametrize("N, B, L", SIZES[1:-1])
def test_a_segment_is_preceded_by_the_last_tokens_of_its_stream(
    N: int, B: int, L: int, ext_len: int, kind: dict[str, Any]
) -> None:
    streams, plain = make(N, B, L, ext_len=ext_len, **kind), make(N, B, L, **kind)
    for epoch in (0, 3):
        text = [arrays(read_epoch(plain, epoch), b) for b in range(B)]
        starts = positions_of(plain, epoch)
        assert positions_of(streams, epoch) == starts
        for at in starts:
            (segment, _), (new, _) = streams.batch(at), plain.batch(at)
            assert segment.inputs_SBL.shape[2] == ext_len + new.inputs_SBL.shape[2]
            for b in range(B):
                length = int(new.length_SB[0, b])
                end = at.token_offset + length
                begin = max(at.token_offset - ext_len, 0) if length else end
                *result, weights_L = arrays(segment, b)
                for array_L, array_T in zip(result, text[b], strict=False):
                    np.testing.assert_array_equal(array_L, array_T[begin:end])
                expected_L = np.arange(begin, end) >= at.token_offset
                np.testing.assert_array_equal(weights_L, expected_L)


@pytest.mark.parametrize("warm_tokens", [0, 3, 1000])
@pytest.mark.parametrize("ext_len", [0, *EXTENSIONS])
@pytest.mark.parametrize("N, B, L", SIZES)
def test_warm_tokens_precede_the_scored_tokens(
    N: int, B: int, L: int, ext_len: int, warm_tokens: int
) -> None:
    """As the context of the first segments, or without ext_len as segments."""
    streams = Streams(positions(N), B, L, ext_len=ext_len, warm_tokens=warm_tokens)
    parts, cold = list(streams.epoch()), 0
    full = ext_len or 20  # the context of a warm token
    assert streams.segments_per_epoch == len(parts)
    assert parts[-1].length_SB.max() > 0, "no segment is all padding"
    for b in range(B):
        begin, end = b * (N - 1) // B, (b + 1) * (N - 1) // B
        start = max(begin - warm_tokens, 0)
        for number, segment in enumerate(parts):
            at = (begin if ext_len else start) + number * L
            stop = min(at + L, end)
            oldest = max(at - ext_len, start) if at < end else stop
            inputs_L, targets_L, first_L, weights_L = arrays(segment, b)
            np.testing.assert_array_equal(inputs_L, np.arange(oldest, stop))
            np.testing.assert_array_equal(targets_L, inputs_L + 1)
            np.testing.assert_array_equal(weights_L, inputs_L >= max(at, begin))
            np.testing.assert_array_equal(first_L, inputs_L == start)
            cold += sum(pair - start < full for pair in range(max(at, begin), stop))
    assert streams.cold_tokens(full) == cold


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("N, B, L", SIZES)
def test_half_loss_scores_the_recent_half_of_each_segment(
    N: int, B: int, L: int, kind: dict[str, Any]
) -> None:
    plain = read_epoch(make(N, B, L, **kind), 1)
    half = read_epoch(make(N, B, L, half_loss=True, **kind), 1)
    at_L = np.arange(half.inputs_SBL.shape[2])
    expected = real(plain) & (at_L >= plain.length_SB[..., None] // 2)
    np.testing.assert_array_equal(half.weights_SBL, expected)
    for name in ("inputs_SBL", "targets_SBL", "first_SBL", "length_SB"):
        np.testing.assert_array_equal(getattr(half, name), getattr(plain, name))
