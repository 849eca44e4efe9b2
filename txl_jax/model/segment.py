"""The model's input: segments of streams of tokens (section 3.2).

Dims: S segments in one call, B streams, L segment.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # reading streams needs no jax
    from jax import Array


class Segment(NamedTuple):
    """S consecutive segments of B streams.

    weights_SBL is 1 where the target is scored; first_SBL marks the start of a
    document, which sees nothing before it; length_SB counts real tokens, with padding
    at the right end only.
    """

    inputs_SBL: np.ndarray  # int32
    targets_SBL: np.ndarray  # int32
    weights_SBL: np.ndarray  # float32
    first_SBL: np.ndarray  # bool
    length_SB: np.ndarray  # int32


class OneSegment(NamedTuple):
    """One of the segments of a `Segment`, as the body of a scan over S sees it."""

    inputs_BL: "Array"
    targets_BL: "Array"
    weights_BL: "Array"
    first_BL: "Array"
    length_B: "Array"


def scanned(segments: Segment) -> OneSegment:
    """Returns the segments as inputs of `jax.lax.scan`, which slices S away."""
    return OneSegment._make(segments)
