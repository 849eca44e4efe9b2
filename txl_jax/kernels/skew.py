"""The relative shift inside one tile, for the TPU kernels (Appendix B).

The rows of a tile are T keys, its columns are queries. In a tile that is d tiles away
from the diagonal, key y and query x have the distance d * T + x - y. The products with
distances also come in tiles of T rows, in decreasing distance: row t of

    near   is distance d * T + T - 1 - t     far   is distance (d - 1) * T + T - 1 - t

With T = 4, and n0 for row 0 of `near`:

    near        far         merged          skewed: rows are keys
    n0 n0 n0 n0 f0 f0 f0 f0 f0 f0 f0 n0     n3 n2 n1 n0    diagonal (d = 0): only
    n1 n1 n1 n1 f1 f1 f1 f1 f1 f1 n1 n1     f0 n3 n2 n1    the upper triangle is
    n2 n2 n2 n2 f2 f2 f2 f2 f2 n2 n2 n2     f1 f0 n3 n2    visible, so `far` is
    n3 n3 n3 n3 f3 f3 f3 f3 n3 n3 n3 n3     f2 f1 f0 n3    not needed

`merge` combines both in one tile, `skew` rolls its column x down by x + 1 rows, and
`unskew` is the inverse of `skew`, which is also its transpose.

A roll by whole registers only renames them. This leaves 127 - l of the shift of column
x + l, where x is a multiple of 128 and l < 128: three rotates within registers for its
bits 1, 2 and 4, then selects between registers. The hardware's strided rotate has
only one direction.

Dims: T rows (keys or distances) of a tile, X columns (queries), a multiple of 128.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # columns of a register
SUBLANES = 8  # its rows


def by_register(function: Callable[..., Array], first: int, *arrays_TX: Array) -> Array:
    """Applies a function to blocks of 128 columns; `first` is the query of column 0."""
    columns = range(0, arrays_TX[0].shape[1], LANES)
    parts = [
        function(first + x, *(array_TX[:, x : x + LANES] for array_TX in arrays_TX))
        for x in columns
    ]
    return jnp.concatenate(parts, axis=1)


def roll_rows(x_TX: Array, rows: int) -> Array:
    """Rolls all columns down by a multiple of 8 rows, which only reorders registers."""
    rows %= x_TX.shape[0]
    return jnp.concatenate([x_TX[-rows:], x_TX[:-rows]]) if rows else x_TX


def roll_columns(x_TX: Array, *, up: bool) -> Array:
    """Rolls column l of 128 by 127 - l rows, up or down."""
    groups = x_TX.shape[0] // SUBLANES
    x_GSX = x_TX.reshape(groups, SUBLANES, LANES)
    shift = (LANES - 1) - jax.lax.broadcasted_iota(jnp.int32, x_GSX.shape, 2)
    row = jax.lax.broadcasted_iota(jnp.int32, x_GSX.shape, 1)
    for bit in (1, 2, 4):
        rolled = pltpu.roll(x_GSX, SUBLANES - bit if up else bit, 1)
        x_GSX = jnp.where((shift & bit) != 0, rolled, x_GSX)
    # A row that left its group of 8 re-entered at the other end, one group further.
    steps = (row + shift if up else shift - row + (SUBLANES - 1)) >> 3
    for bit in (1, 2, 4, 8, 16):
        if by := (bit if up else -bit) % groups:
            rolled = jnp.concatenate([x_GSX[by:], x_GSX[:by]])
            x_GSX = jnp.where((steps & bit) != 0, rolled, x_GSX)
    return x_GSX.reshape(x_TX.shape)


def skew(x_TX: Array, first: int) -> Array:
    """Rolls the column of query x down by x + 1 rows; column 0 is query `first`."""
    return by_register(
        lambda x, x_TX: roll_columns(roll_rows(x_TX, x + LANES), up=True), first, x_TX
    )


def unskew(x_TX: Array, first: int) -> Array:
    """Rolls the column of query x up by x + 1 rows; column 0 is query `first`."""
    return by_register(
        lambda x, x_TX: roll_rows(roll_columns(x_TX, up=False), -x - LANES), first, x_TX
    )


def merge(near_TX: Array, far_TX: Array, first: int) -> Array:
    """Returns the last x + 1 rows of `near` under the first rows of `far`."""

    def one(x: int, near_TX: Array, far_TX: Array) -> Array:
        T = near_TX.shape[0]
        start = T - LANES - x
        end = min(start + LANES, T)  # under 128 rows if the first lanes are empty
        row = jax.lax.broadcasted_iota(jnp.int32, (end - start, LANES), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (end - start, LANES), 1)
        border = jnp.where(
            row + column >= LANES - 1, near_TX[start:end], far_TX[start:end]
        )
        parts = [far_TX[:start], border, near_TX[end:]]
        return jnp.concatenate([part for part in parts if part.shape[0]])

    return by_register(one, first, near_TX, far_TX)
