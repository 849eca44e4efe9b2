"""The relative shift inside one tile, for the TPU kernels (Appendix B).

A tile has T keys down its rows and, across its columns, queries. Row y of column x
is d * T + x - y apart when the tile lies d tiles away from the diagonal. Products
with the distances come in tiles of T rows too, in decreasing distance: row t of

    near   is d * T + T - 1 - t apart        far   is T closer: (d - 1) * T + T - 1 - t

so that a column reads the last x + 1 rows of `near`, and after them the first
T - 1 - x of `far`. With T = 4, and n0 for row 0 of `near`:

    near        far         merged          skewed: rows are keys
    n0 n0 n0 n0 f0 f0 f0 f0 f0 f0 f0 n0     n3 n2 n1 n0    diagonal (d = 0): only
    n1 n1 n1 n1 f1 f1 f1 f1 f1 f1 n1 n1     f0 n3 n2 n1    the upper triangle is
    n2 n2 n2 n2 f2 f2 f2 f2 f2 n2 n2 n2     f1 f0 n3 n2    visible, so nothing of
    n3 n3 n3 n3 f3 f3 f3 f3 n3 n3 n3 n3     f2 f1 f0 n3    `far` is needed

`merge` puts both into one tile, `skew` rolls its column x down by x + 1 rows, `unskew`
is the inverse, and so also the transpose, of `skew`.

The hardware's registers hold 8 rows of 128 columns. A roll by whole registers is a
renaming, so of the shift of column x + l, x being a multiple of 128 and l < 128,
only 127 - l is left to do: three rotates inside the registers for its bits 1, 2 and 4,
then selects between registers for the rest. That runs on every chip; the chips' own
rotate by a stride is missing on v4, and cannot turn the other way.

Per register of scores: 3 rotates, 8 selects, and one more on 128 of T rows to merge.

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
    """Applies a function to each 128 columns; `first` is the query of column 0."""
    columns = range(0, arrays_TX[0].shape[1], LANES)
    parts = [
        function(first + x, *(array_TX[:, x : x + LANES] for array_TX in arrays_TX))
        for x in columns
    ]
    return jnp.concatenate(parts, axis=1)


def roll_rows(x_TX: Array, rows: int) -> Array:
    """Rolls all columns down by a multiple of 8 rows: no work, another order."""
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
    # A row that left its group of 8 came back at its other end: one group more.
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
        begin = T - LANES - x
        end = min(
            begin + LANES, T
        )  # less than 128 rows where the first lanes are empty
        row = jax.lax.broadcasted_iota(jnp.int32, (end - begin, LANES), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (end - begin, LANES), 1)
        border = jnp.where(
            row + column >= LANES - 1, near_TX[begin:end], far_TX[begin:end]
        )
        parts = [far_TX[:begin], border, near_TX[end:]]
        return jnp.concatenate([part for part in parts if part.shape[0]])

    return by_register(one, first, near_TX, far_TX)
