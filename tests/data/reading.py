"""Streams over a text whose tokens are their own positions, read epoch by epoch.

Dims: S segments, B streams, L segment, T tokens of a stream's epoch.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from txl_jax.data.streams import Position, Streams
from txl_jax.model.segment import Segment

# (N tokens, B streams, L segment)
SIZES = [
    (2, 1, 5),  # one pair, and a segment longer than everything
    (5, 4, 1),  # one pair each
    (17, 1, 5),  # a ragged last segment
    (17, 4, 4),  # streams of one full segment each
    (18, 4, 2),  # 4 streams cannot share 17 pairs equally
    (101, 8, 13),
    (997, 3, 40),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"roll": True},
    {"varlen": True},
    {"roll": True, "varlen": True, "reset_memory_at": 7},
    {"sentence_end": 7, "reset_memory_at": 7},
    {"sentence_end": 7, "varlen": True},
]


def positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def make(N: int, *sizes: int, **kind: Any) -> Streams:
    """Returns streams over N positions, where each sentence ends with a 7."""
    text = positions(N) + 100
    text[3::11] = text[-1] = 7
    return Streams(text, *sizes, seed=5, **kind)


def joined(parts: Iterable[Segment]) -> Segment:
    """Returns all segments in one, with a longer S."""
    return Segment(*map(np.concatenate, zip(*parts, strict=True)))


def positions_of(streams: Streams, epoch: int) -> list[Position]:
    """Returns the position of each segment of an epoch, S = 1."""
    found, position = [], Position(epoch)
    while position.epoch == epoch:
        found.append(position)
        _, position = streams.batch(position)
    return found


def read_epoch(streams: Streams, epoch: int = 0) -> Segment:
    """Returns all segments of an epoch in one, from streams with S = 1."""
    return joined(streams.batch(at)[0] for at in positions_of(streams, epoch))


def real(segment: Segment) -> np.ndarray:
    """Returns where there is no padding, bool [S, B, L]."""
    return np.arange(segment.inputs_SBL.shape[2]) < segment.length_SB[..., None]


def of_stream(array_SBL: np.ndarray, segment: Segment, b: int) -> np.ndarray:
    """Returns the part of an array that stream b reads, without padding, [T]."""
    return array_SBL[:, b][real(segment)[:, b]]


def assert_same(result: Segment, expected: Segment) -> None:
    for name, left, right in zip(Segment._fields, result, expected, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert left.dtype == right.dtype, name
