"""The model's input: segments of streams of tokens (section 3.2).

Dims: S segments in one call, B streams, L segment.
"""

from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """S consecutive segments of B streams; inside a scan over S, one of them.

    weights_SBL is 1 where the target is scored; first_SBL marks the start of a
    document, which sees nothing before it; length_SB counts real tokens, with padding
    at the right end only.
    """

    inputs_SBL: np.ndarray  # int32
    targets_SBL: np.ndarray  # int32
    weights_SBL: np.ndarray  # float32
    first_SBL: np.ndarray  # bool
    length_SB: np.ndarray  # int32
