"""The scores of one tile, for both TPU kernels (section 3.3).

The backward kernel recomputes them instead of reading them back. Scores are in units
of log 2, because the hardware exponential has base 2.

The relative shift (Appendix B) happens inside one tile, whose rows are T keys and whose
columns are queries. In a tile that is d tiles away from the diagonal, key y and query x
have the distance d * T + x - y. The products with distances also come in tiles of T
rows, in decreasing distance: row t of

    near   is distance d * T + T - 1 - t     far   is distance (d - 1) * T + T - 1 - t

With T = 4, and n0 for row 0 of `near`:

    near        far         merged          skewed: rows are keys
    n0 n0 n0 n0 f0 f0 f0 f0 f0 f0 f0 n0     n3 n2 n1 n0    diagonal (d = 0): only
    n1 n1 n1 n1 f1 f1 f1 f1 f1 f1 n1 n1     f0 n3 n2 n1    the upper triangle is
    n2 n2 n2 n2 f2 f2 f2 f2 f2 n2 n2 n2     f1 f0 n3 n2    visible, so `far` is
    n3 n3 n3 n3 f3 f3 f3 f3 n3 n3 n3 n3     f2 f1 f0 n3    not needed

`merge` combines both in one tile, `skew` rolls its column x down by x + 1 rows, and
`unskew` is the inverse of `skew`, which is also its transpose.

Dims: T rows of a tile (keys or distances), W its keys and Z its queries by lane, X the
lanes of a strip, Y the keys that it may see, C features of the product with distances.
`refs` are a kernel's arguments, `forward.Refs` or `backward.Refs`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.kernels.hash import STEP, keep_counter, murmur3
from txl_jax.kernels.tpu.blocks import LANES, SUBLANES, Blocks, Ref, Strip

LOG2E = math.log2(math.e)
f32 = jnp.float32


def dot(a: Array, b: Array, contract: str) -> Array:
    """Returns a product in float32; `contract` has einsum's notation."""
    # Stated for both types: the TPU compiler refuses "highest" for bfloat16 products.
    precision = "highest" if a.dtype == f32 else "default"
    left, right = contract.split(",")
    shared = next(letter for letter in left if letter in right)
    axes = ((left.index(shared),), (right.index(shared),))
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=f32
    )


class Place(NamedTuple):
    """The position of a step in the grid."""

    b: Array
    h: Array
    i: Array  # query tile
    d: Array  # tiles from the diagonal
    j: Array  # key tile
    deepest: Array
    clear: Array


def place(blocks: Blocks, refs: Ref) -> Place:
    """Returns the running step's place in the grid of `blocks.specs`."""
    h, b, i, d = (pl.program_id(axis) for axis in range(4))
    at = b * blocks.query_tiles + i
    j = blocks.diagonal(i) - d
    return Place(b, h, i, d, j, refs.deepest[at], refs.clear[at])


def visit(here: Place, step: Callable[..., None]) -> None:
    """Runs the variant of step(on_diagonal, masked) that this tile needs, if any.

    The diagonal is a variant because half of it is in the future.
    """
    inside = here.d <= here.clear
    later = (here.d > 0) & (here.d <= here.deepest)
    away = functools.partial(step, on_diagonal=False)
    pl.when(here.d == 0)(functools.partial(step, on_diagonal=True, masked=True))
    pl.when(later & inside)(functools.partial(away, masked=False))
    pl.when(later & jnp.logical_not(inside))(functools.partial(away, masked=True))


def prepare(refs: Ref) -> None:
    """Writes q + u and q + w, scaled, in the operands' type; a bias has factors 1."""
    qu, qw, q_AZ = refs.qu, refs.qw, refs.q[0, 0].astype(f32)
    scale = LOG2E / math.sqrt(q_AZ.shape[0])
    qu[...] = ((q_AZ + refs.u[0]) * scale).astype(qu.dtype)
    if qw is None:
        return
    ones = qw.shape[0] - (0 if refs.w is None else q_AZ.shape[0])
    if ones:
        qw[:ones] = jnp.ones((ones, q_AZ.shape[1]), qw.dtype)
    if refs.w is not None:
        qw[ones:] = ((q_AZ + refs.w[0]) * scale).astype(qw.dtype)


def turn(ref: Ref, blocks: Blocks) -> Ref:
    """Returns the rows of a tile of keys or distances, [T, features]; None for None."""
    return None if ref is None else ref[(0,) * (ref.ndim - 2)].T[blocks.empty :]


def score(
    strip: Strip, on_diagonal: bool, k_TA: Array, r_TC: Array | None, refs: Ref
) -> Array:
    """Returns score_YX before the mask.

    Half of the products with distances belong to this tile, and half are carried to the
    next one: one product per tile, not two. On the diagonal the other half is in the
    future, so nothing carried is read.
    """
    at = strip.lanes
    if r_TC is None:
        return dot(k_TA[: strip.rows], refs.qu[:, at], "TA,AX")
    position_TX = dot(r_TC, refs.qw[:, at], "TC,CX")
    if on_diagonal:
        merged_YX = position_TX[position_TX.shape[0] - strip.rows :]
    else:
        merged_YX = merge(position_TX, refs.carried[:, at], strip.first)
    refs.carried[:, at] = position_TX
    content_YX = dot(k_TA[: strip.rows], refs.qu[:, at], "TA,AX")
    return content_YX + skew(merged_YX, strip.first)


def visible(
    strip: Strip, on_diagonal: bool, here: Place, blocks: Blocks, refs: Ref
) -> Array:
    """Returns the mask of a strip's visible scores, bool [Y, X]."""
    shape = (strip.rows, strip.columns)
    key_YX = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    visible_YX = key_YX >= refs.oldest[0, :, strip.lanes] - here.j * blocks.tile
    if on_diagonal:
        query_YX = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + strip.first
        visible_YX &= key_YX <= query_YX
    return visible_YX


def keep(strip: Strip, here: Place, blocks: Blocks, rate: float, refs: Ref) -> Array:
    """Returns whether probabilities survive dropout, [Y, X]; see `hash.keep_BHLK`.

    The counter steps from key to key by addition.
    """
    seed, stream0, head0 = (refs.counter[n].astype(jnp.uint32) for n in range(3))
    stream = stream0 + here.b.astype(jnp.uint32)
    head = head0 + here.h.astype(jnp.uint32)
    shape = (SUBLANES, strip.columns)
    query_SX = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + strip.first
    query_SX += here.i * blocks.tile - blocks.hidden_queries
    start_SX = murmur3(murmur3(seed ^ stream) ^ head)
    start_SX = murmur3(start_SX ^ query_SX.astype(jnp.uint32))
    key_SX = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    key_SX += here.j * blocks.tile - blocks.hidden_keys
    start_SX += key_SX.astype(jnp.uint32) * jnp.uint32(STEP)
    groups = range(0, strip.rows, SUBLANES)
    counters = [start_SX + jnp.uint32(key * STEP % 2**32) for key in groups]
    return keep_counter(rate, jnp.concatenate(counters))


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
    """Rolls column l of 128 by 127 - l rows, up or down.

    Three rotates within registers for bits 1, 2 and 4, then selects between registers.
    The hardware's strided rotate has only one direction.
    """
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
