"""The relative shift inside a tile is the one of its docstring, and is undone.

Dims: T rows of a tile, X columns (queries).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels.skew import merge, skew, unskew

# Rows of the tile, columns, and the query of column 0.
SIZES = [
    (16, 128, -112),
    (160, 256, -96),
    (304, 256, 48),
    (256, 128, 128),
]
sizes = pytest.mark.parametrize(("T", "X", "first"), SIZES)


def draw(T: int, X: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(T, X)).astype(np.float32)


@sizes
def test_skew_rolls_the_column_of_query_x_down_by_x_plus_1(
    T: int, X: int, first: int
) -> None:
    """And `unskew` undoes it."""
    x_TX = draw(T, X, 0)
    expected = [np.roll(x_TX[:, x], first + x + 1) for x in range(X)]
    skewed_TX = tiny.jit(skew, static_argnums=1)(x_TX, first)
    np.testing.assert_array_equal(skewed_TX, np.stack(expected, axis=1))
    same_TX = tiny.jit(unskew, static_argnums=1)(skewed_TX, first)
    np.testing.assert_array_equal(same_TX, x_TX)


@sizes
def test_merge_keeps_the_last_rows_of_near(T: int, X: int, first: int) -> None:
    near_TX, far_TX = draw(T, X, 0), draw(T, X, 1)
    merged_TX = np.asarray(tiny.jit(merge, static_argnums=2)(near_TX, far_TX, first))
    for column in range(max(-first, 0), X):
        rows = first + column + 1
        split = T - rows
        np.testing.assert_array_equal(
            merged_TX[split:, column], near_TX[split:, column]
        )
        np.testing.assert_array_equal(merged_TX[:split, column], far_TX[:split, column])


def test_products_with_distances_become_scores_of_keys() -> None:
    """Entries are their own distances, so the score of (y, x) must be d T + x - y."""
    T, X, first, d = 160, 256, -96, 3
    row_T1 = np.arange(T)[:, None]
    near_TX = jnp.broadcast_to(d * T + T - 1.0 - row_T1, (T, X))
    merged_TX = merge(near_TX, near_TX - T, first)
    distance_TX = np.asarray(tiny.jit(skew, static_argnums=1)(merged_TX, first))
    query_X = first + np.arange(X)
    expected_TX = d * T + query_X - row_T1
    seen = query_X >= 0
    np.testing.assert_array_equal(distance_TX[:, seen], expected_TX[:, seen])
