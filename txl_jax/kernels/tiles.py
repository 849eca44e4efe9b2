"""The blocks of queries and tiles of keys that the `chunked` kernel works on.

Queries are cut into Q blocks, padded in front. A block reads its tiles backward from
its newest visible key. Only the first tile contains future keys; the last one contains
the oldest visible key of the block, and older tiles are skipped. With this numbering,
tile t has the same distances, a slab of r, in every block.

Dims: R = K distances; Q blocks of X queries, tiles of Y keys, Z distances in the slab
of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.hash import AttentionDropout, keep_index, start_BHL
from txl_jax.kernels.xla import pad_front

T = TypeVar("T")  # what a loop carries


def choose_blocks(rows: int, L: int, K: int) -> tuple[int, int]:
    """Returns X and Y, at least X, for rows = streams x heads.

    Y keys need a slab of X + Y distances, so tiles are wider than high: at least 128 x
    256, with more keys up to 2^19 scores. These 2 MiB are enough work for one call on
    an accelerator and fit a CPU's cache.
    """
    X = even_parts(L, 128)
    Y = even_parts(K, max(256, 2**19 // (rows * X)))
    return X, max(X, Y)


def even_parts(size: int, most: int) -> int:
    """Returns the size of equal parts of at most `most`, a multiple of 8 or `size`."""
    parts = -(-size // most)
    return size if parts == 1 else -(-size // (8 * parts)) * 8


class Plan(NamedTuple):
    """The static sizes into which queries and keys are cut."""

    L: int
    K: int
    X: int
    Y: int
    rate: float  # of dropout
    Q: int  # blocks of queries
    tiles: int  # of the last block, which has the most
    front_L: int  # padding in front of the queries
    front_K: int  # padding in front of the keys
    front_R: int  # padding in front of the distances


def make_plan(L: int, K: int, X: int, Y: int, rate: float) -> Plan:
    """Returns the sizes of blocks of X queries and tiles of Y keys."""
    Q, tiles = -(-L // X), -(-K // Y)
    # Enough for the last tile of any block.
    front_K = max(-(K - block * X) % Y for block in range(Q))
    return Plan(L, K, X, Y, rate, Q, tiles, Q * X - L, front_K, tiles * Y - K)


class Queries(NamedTuple):
    """A block's q + u and q + w; with a leading Q, those of all blocks."""

    content_HBXA: Array
    position_HBXA: Any = None  # an array if there are distances


class Rows(NamedTuple):
    """The visible keys of a block's queries; with a leading Q, those of all blocks."""

    end: Array  # one past the newest key that the block sees
    oldest_BX: Array
    start_HBX: Array | None  # of dropout's counter


class Keys(NamedTuple):
    """Keys, values and distances for all blocks, padded in front, or of a tile."""

    k_HBKA: Array
    v_HBKA: Array
    r_HRA: Array | None
    bias_HR: Array | None


class Tile(NamedTuple):
    """A slice of Keys, its position there, and its masks."""

    keys: Keys
    start: tuple[Array, Array, Array | int, Array | int]
    visible_BXY: Array
    keep_HBXY: Array | None


# The axis of keys, or of distances, in each array of Keys.
AXES = (2, 2, 1, 1)


def read_tile(
    plan: Plan, keys: Keys, rows: Rows, t: Array | int, diagonal: bool
) -> Tile:
    """Returns tile t of a block; the diagonal tile t = 0 needs no future distances."""
    key = rows.end - (t + 1) * plan.Y
    start_K, start_R = key + plan.front_K, (plan.tiles - 1 - t) * plan.Y
    start = (start_K, start_K, start_R, start_R)
    Z = plan.Y if diagonal else plan.X + plan.Y

    def part(x: Any, start: Array | int, size: int, axis: int) -> Any:
        return x if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    part_of_keys = Keys(*map(part, keys, start, (plan.Y, plan.Y, Z, Z), AXES))
    key_Y = key + jnp.arange(plan.Y)
    visible_BXY = key_Y >= rows.oldest_BX[..., None]
    if diagonal:
        newest_X = rows.end - plan.X + jnp.arange(plan.X)
        visible_BXY &= key_Y <= newest_X[:, None]
    keep_HBXY = None
    if rows.start_HBX is not None:
        index_Y = key_Y.astype(jnp.uint32)
        keep_HBXY = keep_index(plan.rate, rows.start_HBX[..., None], index_Y)
    return Tile(part_of_keys, start, visible_BXY, keep_HBXY)


def add_tile(keys: Keys, tile: Tile, part: Keys) -> Keys:
    """Adds `part` to the slice of `keys` that the tile was read from."""

    def add(x: Any, part: Any, start: Array | int, axis: int) -> Any:
        if x is None:
            return None
        old = jax.lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
        return jax.lax.dynamic_update_slice_in_dim(x, old + part, start, axis)

    return Keys(*map(add, keys, part, tile.start, AXES))


def over_tiles(
    plan: Plan, keys: Keys, rows: Rows, add: Callable[[T, Tile], T], carry: T
) -> T:
    """Folds `add` over all tiles of a block that have a visible key.

    The number of tiles depends on the data, so this loop is not differentiable.
    """
    carry = add(carry, read_tile(plan, keys, rows, 0, diagonal=True))
    if plan.tiles == 1:
        return carry

    def step(t: Array, carry: T) -> T:
        return add(carry, read_tile(plan, keys, rows, t, diagonal=False))

    span = rows.end - jnp.min(rows.oldest_BX)
    return jax.lax.fori_loop(1, (span + plan.Y - 1) // plan.Y, step, carry)


def cut_queries(plan: Plan, x_BLHA: Array) -> Array:
    """Returns blocks of queries, x_QHBXA."""
    B, _, H, A = x_BLHA.shape
    x_BLHA = pad_front(x_BLHA, plan.front_L, axis=1)
    return x_BLHA.reshape(B, plan.Q, plan.X, H, A).transpose(1, 3, 0, 2, 4)


def join_queries(plan: Plan, x_QHBXA: Array) -> Array:
    """Returns x_BLHA: the inverse of `cut_queries`."""
    Q, H, B, X, A = x_QHBXA.shape
    x_BLHA = x_QHBXA.transpose(2, 0, 3, 1, 4).reshape(B, Q * X, H, A)
    return x_BLHA[:, plan.front_L :]


def make_keys(
    plan: Plan,
    k_BKHA: Array,
    v_BKHA: Array,
    r_RHA: Array | None,
    bias_HR: Array | None,
) -> Keys:
    """Returns keys, values and distances, heads first."""
    k_HBKA, v_HBKA = (
        pad_front(x_BKHA, plan.front_K, axis=1).transpose(2, 0, 1, 3)
        for x_BKHA in (k_BKHA, v_BKHA)
    )
    r_HRA = None
    if r_RHA is not None:
        r_HRA = pad_front(r_RHA, plan.front_R, axis=0).transpose(1, 0, 2)
    if bias_HR is not None:
        bias_HR = pad_front(bias_HR, plan.front_R)
    return Keys(k_HBKA, v_HBKA, r_HRA, bias_HR)


def make_rows(
    plan: Plan, H: int, oldest_BL: Array, dropout: AttentionDropout | None
) -> Rows:
    """Returns the intervals of visible keys, and the counters of dropout."""
    B, L = oldest_BL.shape
    Q, X = plan.Q, plan.X
    # Padded queries see nothing; padded keys are older than every visible key.
    oldest_BL = pad_front(jnp.maximum(oldest_BL, 0), plan.front_L, value=plan.K)
    start_QHBX = None
    if dropout is not None:
        start = pad_front(start_BHL(dropout, B, H, L), plan.front_L)
        start_QHBX = start.reshape(B, H, Q, X).transpose(2, 1, 0, 3)
    return Rows(
        jnp.arange(plan.K - (Q - 1) * X, plan.K + 1, X),
        oldest_BL.reshape(B, Q, X).transpose(1, 0, 2),
        start_QHBX,
    )
