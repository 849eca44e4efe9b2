"""Every position scheme in numpy: a part of `tests.reference`.

Relative schemes score a key by its distance from the query: terms (b) and (d). Absolute
schemes add to the layers' inputs, and attention then scores only contents.

Dims: P rows of a learned table, D d_model, H heads, A size of a head.
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]


# Published for 8 heads, and computed by the authors' code for 2, 3 and 12.
ALIBI_SLOPES = {
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


def position_encoding(distance: int, d_model: int, clamp_len: int) -> Array:
    """Returns R at a distance: all sines, then all cosines (not interleaved)."""
    position = min(distance, clamp_len) if clamp_len > 0 else distance
    angles = [position * 10000.0 ** (-2 * k / d_model) for k in range(d_model // 2)]
    return np.array([math.sin(x) for x in angles] + [math.cos(x) for x in angles])


def at_distance(
    position: str,
    attention: Params,
    w_HA: Array,
    clamp_len: int,
    distance: int,
    h: int,
) -> tuple[Array, float]:
    """Returns head h's vector r_A, which multiplies q, and term (d) at a distance.

    "transformer_xl" is the paper's, "shaw" has learned vectors and no term (d),
    "shaw_biased" a learned number as term (d). Learned tables end with distance 0;
    their first row also serves all farther distances.
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
    if position == "alibi":
        distance = min(distance, clamp_len) if clamp_len > 0 else distance
        # Scores are divided by the root of A; the published biases are not.
        return np.zeros(A), -ALIBI_SLOPES[len(w_HA)][h] * distance * math.sqrt(A)
    return np.zeros(A), 0.0


def rotated(position: str, k_A: Array, distance: int) -> Array:
    """Returns the key as a query `distance` tokens later sees it."""
    if position != "rotary":
        return k_A
    half = len(k_A) // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    pair = (k_A[:half] + 1j * k_A[half:]) * np.exp(-1j * distance * frequency)
    return np.concatenate([pair.real, pair.imag])
