"""The shift inside a tile is that of the docstring, and `unskew` inverts it.

Dims: T rows of a tile, X columns (queries).
"""

import jax
import numpy as np
import pytest
from jax import Array

from txl_jax.kernels.skew import merge, skew, unskew


# Rows of the tile, columns, and the query of column 0.
@pytest.mark.parametrize(
    ("T", "X", "first"),
    [(16, 128, -112), (160, 256, -96), (304, 256, 48), (256, 128, 128)],
)
def test_skewed_products_are_scores_of_keys(T: int, X: int, first: int) -> None:
    """Entries are their own distances, so the score of (y, x) must be d T + x - y."""
    d, row_T1 = 3, np.arange(T)[:, None]
    near_TX = np.broadcast_to(np.float32(d * T + T - 1 - row_T1), (T, X))

    def shift(near_TX: Array) -> tuple[Array, ...]:
        merged_TX = merge(near_TX, near_TX - T, first)
        skewed_TX = skew(merged_TX, first)
        return merged_TX, skewed_TX, unskew(skewed_TX, first)

    merged_TX, distance_TX, same_TX = jax.jit(shift)(near_TX)
    query_X = first + np.arange(X)
    expected_TX = d * T + query_X - row_T1
    seen = query_X >= 0
    np.testing.assert_array_equal(distance_TX[:, seen], expected_TX[:, seen])
    np.testing.assert_array_equal(same_TX, merged_TX)
