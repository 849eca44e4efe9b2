"""How attention is cut into blocks of queries and tiles of keys, for `chunked`.

Queries are cut into Q blocks, padded in front. A block reads its tiles backward from
the newest key that it sees: the first one alone has a future to hide, the last one
holds the oldest key of any of its queries, and what is older is not computed. Counted
like this, tile t has the same distances in every block: a slab of r.

Dims: B streams, L queries, M memory, K = M + L keys, R = K distances, H heads, A head;
Q blocks of X queries, tiles of Y keys, Z distances in the slab of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.xla import Dropout, kept, mix


class Blocks(NamedTuple):
    """Sizes of a block of queries and a tile of keys; X is at most Y."""

    X: int
    Y: int


def choose_blocks(rows: int, L: int, K: int) -> Blocks:
    """Returns the blocks for so many rows (streams x heads).

    A slab has X + Y distances for Y keys, so tiles are wider than high. At least 128 x
    256, and more keys while a tile has fewer than 2^19 scores: 2 MiB, enough to be
    worth an accelerator's call and little enough for a CPU's cache.
    """
    X = even_parts(L, 128)
    Y = even_parts(K, max(256, 2**19 // (rows * X)))
    return Blocks(X, max(X, Y))


def even_parts(size: int, most: int) -> int:
    """Returns the size of equal parts: the whole, or a multiple of 8."""
    parts = -(-size // most)
    return size if parts == 1 else -(-size // (8 * parts)) * 8


class Plan(NamedTuple):
    """How the queries and keys are cut: what is known when the program is made."""

    L: int
    M: int
    X: int
    Y: int
    rate: float  # of dropout

    @property
    def Q(self) -> int:
        """Blocks of queries."""
        return -(-self.L // self.X)

    @property
    def tiles(self) -> int:
        """Tiles of the last block, which has the most."""
        return -(-(self.L + self.M) // self.Y)

    @property
    def front_L(self) -> int:
        """Queries of padding."""
        return self.Q * self.X - self.L

    @property
    def front_K(self) -> int:
        """Keys of padding: the last tile of no block begins before them."""
        ends = (self.L + self.M - block * self.X for block in range(self.Q))
        return max(-end % self.Y for end in ends)

    @property
    def front_R(self) -> int:
        """Distances of padding."""
        return self.tiles * self.Y - self.L - self.M


class Queries(NamedTuple):
    """A block's queries with u and with w added; all Q blocks outside the scan."""

    content_HBXA: Array
    position_HBXA: Array | None


class Rows(NamedTuple):
    """What else a block has for each query; all Q blocks outside the scan."""

    end: Array  # the newest key that the block sees, and one
    oldest_BX: Array
    counter_HBX: Array | None  # where dropout starts to count


class Keys(NamedTuple):
    """What all blocks read, padded in front."""

    k_HBKA: Array
    v_HBKA: Array
    r_HRA: Array | None
    bias_HR: Array | None


class Tile(NamedTuple):
    """What a block reads at once, where that begins in Keys, and which of it counts."""

    keys: Keys
    start: tuple[Array, Array, Array, Array]
    visible_BXY: Array
    keep_HBXY: Array | None


# Where the keys, or the distances, are in each array of Keys.
AXES = (2, 2, 1, 1)


def read_tile(plan: Plan, keys: Keys, rows: Rows, t: Any, diagonal: bool) -> Tile:
    """Returns tile t of a block; the diagonal one, t = 0, needs no future distances."""
    key = rows.end - (t + 1) * plan.Y
    start_K, start_R = key + plan.front_K, (plan.tiles - 1 - t) * plan.Y
    start = (start_K, start_K, start_R, start_R)
    Z = plan.Y if diagonal else plan.X + plan.Y

    def part(x: Array | None, start: Array, size: int, axis: int) -> Any:
        return x if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    sizes = (plan.Y, plan.Y, Z, Z)
    part_of_keys = Keys(*map(part, keys, start, sizes, AXES))
    key_Y = key + jnp.arange(plan.Y)
    visible_BXY = key_Y >= rows.oldest_BX[..., None]
    if diagonal:
        newest_X = rows.end - plan.X + jnp.arange(plan.X)
        visible_BXY &= key_Y <= newest_X[:, None]
    keep_HBXY = None
    if rows.counter_HBX is not None:
        counter_HBX1, key_Y = rows.counter_HBX[..., None], key_Y.astype(jnp.uint32)
        keep_HBXY = kept(plan.rate, counter_HBX1, key_Y)
    return Tile(part_of_keys, start, visible_BXY, keep_HBXY)


def add_tile(keys: Keys, tile: Tile, part: Keys) -> Keys:
    """Returns keys with `part` added where the tile was read."""

    def add(x: Any, part: Array | None, start: Array, axis: int) -> Any:
        if part is None:
            return None
        old = jax.lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
        return jax.lax.dynamic_update_slice_in_dim(x, old + part, start, axis)

    return Keys(*map(add, keys, part, tile.start, AXES))


def over_tiles(
    plan: Plan, keys: Keys, rows: Rows, add: Callable[[Any, Tile], Any], carry: Any
) -> Any:
    """Returns the carry after every tile in which the block sees a key.

    How many they are is known only when the program runs: neither derivative goes
    through this loop.
    """
    carry = add(carry, read_tile(plan, keys, rows, 0, diagonal=True))
    if plan.tiles == 1:
        return carry

    def step(t: Array, carry: Any) -> Any:
        return add(carry, read_tile(plan, keys, rows, t, diagonal=False))

    span = rows.end - jnp.min(rows.oldest_BX)
    return jax.lax.fori_loop(1, (span + plan.Y - 1) // plan.Y, step, carry)


def make_counter(dropout: Dropout, B: int, H: int, L: int) -> Array:
    """Returns where each query's counter starts, as `xla.keep_BHLK` has it."""
    stream_B, head_H, query_L = (jnp.arange(n, dtype=jnp.uint32) for n in (B, H, L))
    stream_B += jnp.uint32(dropout.stream0)
    head_H += jnp.uint32(dropout.head0)
    start_BH = mix(mix(dropout.seed ^ stream_B)[:, None] ^ head_H)
    return mix(start_BH[..., None] ^ query_L)


def in_front(x: Array, axis: int, size: int, value: int = 0) -> Array:
    """Returns x with so many rows of padding in front."""
    widths = [(size if n == axis else 0, 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def cut_queries(plan: Plan, x_BLHA: Array) -> Array:
    """Returns blocks of queries, x_QHBXA."""
    B, _, H, A = x_BLHA.shape
    x_BLHA = in_front(x_BLHA, 1, plan.front_L)
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

    def pad(x: Array | None, axis: int, size: int) -> Any:
        return x if x is None else in_front(x, axis, size)

    k_HBKA, v_HBKA = (
        pad(x_BKHA, 1, plan.front_K).transpose(2, 0, 1, 3)
        for x_BKHA in (k_BKHA, v_BKHA)
    )
    if r_RHA is None:
        return Keys(k_HBKA, v_HBKA, None, None)
    r_HRA = pad(r_RHA, 0, plan.front_R).transpose(1, 0, 2)
    return Keys(k_HBKA, v_HBKA, r_HRA, pad(bias_HR, 1, plan.front_R))


def make_rows(plan: Plan, H: int, oldest_BL: Array, dropout: Dropout | None) -> Rows:
    """Returns what each query knows of the keys that it sees."""
    B, L = oldest_BL.shape
    Q, X = plan.Q, plan.X
    # Padding sees nothing and is seen by nothing, being older than the oldest.
    oldest_BL = in_front(jnp.maximum(oldest_BL, 0), 1, plan.front_L, L + plan.M)
    counter_QHBX = None
    if dropout is not None:
        counter_BHL = in_front(make_counter(dropout, B, H, L), 2, plan.front_L)
        counter_QHBX = counter_BHL.reshape(B, H, Q, X).transpose(2, 1, 0, 3)
    return Rows(
        jnp.arange(1, Q + 1) * X - plan.front_L + plan.M,
        oldest_BL.reshape(B, Q, X).transpose(1, 0, 2),
        counter_QHBX,
    )
