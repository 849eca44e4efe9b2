"""The model's input: segments of streams of tokens (section 3.2).

Dims: S segments in one call, B streams, L segment, P segments that `join` joins.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # reading streams needs no jax
    from jax import Array


class Segment(NamedTuple):
    """S consecutive segments of B streams.

    weights_SBL is 1 where the target is scored; first_SBL marks the start of a
    document, which sees nothing before it; length_SB counts real tokens, with padding
    at the right end only. `Streams` makes numpy arrays; on the devices they are jax's.
    """

    inputs_SBL: np.ndarray  # int32
    targets_SBL: np.ndarray  # int32
    weights_SBL: np.ndarray  # float32
    first_SBL: np.ndarray  # bool
    length_SB: np.ndarray  # int32


class OneSegment(NamedTuple):
    """One of the segments of a `Segment`, as the body of a scan over S sees it.

    `OneSegment._make(segments)` are the `xs` of such a scan; the arrays still have S.
    """

    inputs_BL: "Array"
    targets_BL: "Array"
    weights_BL: "Array"
    first_BL: "Array"
    length_B: "Array"


def only(segments: Segment) -> OneSegment:
    """Returns the segment of a `Segment` with S = 1."""
    return OneSegment(*(x[0] for x in segments))


def join(segments: Segment, count: int) -> Segment:
    """Joins every `count` consecutive segments, into S / count of count L tokens.

    Padding inside them, as at the end of an epoch, counts as real: the segment after it
    must be empty or start a document, which sees nothing before it.
    """
    if count == 1:
        return segments

    def join_tokens(x_SBL: np.ndarray) -> np.ndarray:
        _, B, L = x_SBL.shape
        x_SBPL = x_SBL.reshape(-1, count, B, L).swapaxes(1, 2)
        return x_SBPL.reshape(-1, B, count * L)

    *tokens, length_SB = segments
    B, L = tokens[0].shape[1:]
    length_SPB = length_SB.reshape(-1, count, B)
    start_P1 = L * np.arange(count, dtype=np.int32)[:, None]
    end_SPB = (length_SPB > 0) * (start_P1 + length_SPB)
    return Segment._make([*map(join_tokens, tokens), end_SPB.max(1)])
