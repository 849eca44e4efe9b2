"""Where a token stands, in numpy, for every scheme: a part of `tests.reference`.

Relative schemes score a key by its distance from the query: terms (b) and (d). Absolute
ones add to what the layers read, and then attention scores contents alone.

Dims: P rows of a learned table, D d_model, H heads, A size of a head.
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]


def position_encoding(distance: int, d_model: int, clamp_len: int) -> Array:
    """Returns R at a distance: all sines, then all cosines (not interleaved)."""
    position = min(distance, clamp_len) if clamp_len > 0 else distance
    angles = [position * 10000.0 ** (-2 * k / d_model) for k in range(d_model // 2)]
    return np.array([math.sin(x) for x in angles] + [math.cos(x) for x in angles])


def at_distance(
    position: str, attention: Params, w_HA: Array, clamp_len: int, distance: int, h: int
) -> tuple[Array, float]:
    """Returns what head h has for a distance: the r_A that meets q, and term (d).

    "transformer_xl" is the paper's, "shaw" has learned vectors and no term (d),
    "shaw_biased" a learned number as term (d). Learned tables end with distance 0, and
    what is farther than their first row counts as it.
    """
    _, A, D = attention["q"].shape
    if position == "transformer_xl":
        r_A = attention["r"][h] @ position_encoding(distance, D, clamp_len)
        return r_A, w_HA[h] @ r_A
    if position in ("shaw", "shaw_biased"):
        distance = min(distance, clamp_len) if clamp_len > 0 else distance
        P = len(attention["distances"])
        row = P - 1 - min(distance, P - 1)
        biased = position == "shaw_biased"
        bias = attention["distance_bias"][row, h] if biased else 0.0
        return attention["distances"][row, h], bias
    return np.zeros(A), 0.0
