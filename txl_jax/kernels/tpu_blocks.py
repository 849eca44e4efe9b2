"""How the TPU kernels cut attention into tiles, what they visit and what they hold.

Operands lie as [A, length], features down the rows, so that A = 64 is not padded to
the 128 lanes of a register; scores lie as [keys, queries]. Queries, keys and
distances are cut into tiles of the same T, with all padding in front. The last query
and the last key share a tile's last place, so query tile i has its diagonal in key
tile i + nk - nq, and d tiles further back it needs the tile nk - 1 - d of the
distances, whatever i. With T = 2, L = M = 3 (x padding, o visible):

              keys 0 1   2 3   4 5
    query tile 0   x x | x x | x x       visits key tiles 1, 0 (d = 0, 1)
                   o o | o o | . .
    query tile 1   o o | o o | o .       visits key tiles 2, 1, 0 (d = 0, 1, 2)
                   o o | o o | o o

A T that is no multiple of 128 is padded, in front again, to W lanes, which is one. A
tile of queries has as many lanes, Z = W, but where all queries fit in one tile its
lanes are only those that hold queries, rounded up to 128. So a short segment after a
long memory takes tall, narrow tiles, and where L + M is small one tile is enough.

The walk back from the diagonal ends at d = `deepest`, the tile of the least `oldest`
of the query tile. Tiles 1 to `clear` lie inside the interval of every query there:
they run a copy of the step that has no mask. Tiles that are not visited are not
copied either, because their index repeats the last one's.

Dims: B streams, L queries, K keys, H heads, A head, T rows of a tile, W lanes of its
keys, Z of its queries, I query tiles, Q and P the padded lengths of queries and of
keys, in lanes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from txl_jax.errors import UserError
from txl_jax.kernels.skew import LANES

# Two rows of bfloat16 share a row of a register, so its registers have 16.
ROWS = 16
MIB = 2**20
# VMEM of one core. A kernel has 16 MiB of it unless it asks for more.
DEFAULT_VMEM = 16 * MIB
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
}
WIDEST = 512  # a wider tile compiles for minutes and gains nothing


def up(size: int, multiple: int) -> int:
    """Returns the size rounded up to a multiple."""
    return -(-size // multiple) * multiple


class Strip(NamedTuple):
    """Neighbouring queries of a tile that are handled at once."""

    lanes: slice
    first: int  # the place in the tile of its first lane; below 0 in padding
    rows: int  # how many keys of the tile these queries may see

    @property
    def columns(self) -> int:
        """How many queries it has."""
        return self.lanes.stop - self.lanes.start


class Blocks(NamedTuple):
    """The sizes of a call: all that a kernel is specialised for."""

    L: int
    K: int
    tile: int  # T
    columns: int  # of a strip: narrow ones spill fewer registers
    vmem: int = DEFAULT_VMEM

    @property
    def width(self) -> int:
        """W, the lanes of a tile of keys."""
        return up(self.tile, LANES)

    @property
    def query_width(self) -> int:
        """Z, the lanes of a tile of queries."""
        return up(self.L, LANES) if self.query_tiles == 1 else self.width

    @property
    def empty(self) -> int:
        """The lanes of padding in front of each tile of keys."""
        return self.width - self.tile

    @property
    def query_tiles(self) -> int:
        """I, also called nq."""
        return -(-self.L // self.tile)

    @property
    def key_tiles(self) -> int:
        """The tiles of keys, and of distances; also called nk."""
        return -(-self.K // self.tile)

    @property
    def hidden_queries(self) -> int:
        """The padding in front of the first query."""
        return self.query_tiles * self.tile - self.L

    @property
    def hidden_keys(self) -> int:
        """The padding in front of the first key."""
        return self.key_tiles * self.tile - self.K

    def diagonal(self, i: Any) -> Any:
        """Returns the key tile in which query tile i meets the diagonal."""
        return i + self.key_tiles - self.query_tiles

    def strips(self, on_diagonal: bool) -> list[Strip]:
        """Returns the strips of a tile; on the diagonal each sees fewer keys."""
        size = LANES if on_diagonal else self.columns
        strips = []
        for x in range(0, self.query_width, size):
            first = self.tile - self.query_width + x
            rows = first + size if on_diagonal else self.tile
            strips.append(Strip(slice(x, x + size), first, rows))
        return strips

    def scores(self) -> int:
        """Returns how many scores a head computes for one stream with full memory."""
        count = 0
        for i in range(self.query_tiles):
            count += self.diagonal(i) * self.tile * self.query_width
            count += sum(strip.rows * LANES for strip in self.strips(True))
        return count


def vmem_bytes(blocks: Blocks, A: int, itemsize: int) -> int:
    """Returns what the backward kernel, the larger, holds in VMEM.

    With a = A rounded up to a register and s = itemsize:

        (6 + 1) s a W               k, v, r, twice as they are fetched ahead; the last r
        (6 s + 2 s + 8) a Z         q, do, dq likewise; q + u, q + w; dq in two parts
        (12 + 2 s) a W nk           dk, dv, dr in float32, and dk, dv as they leave
        8 T Z + 3 s W Z             carried products, float32; weights and gradients
        24 T columns + 2 MiB        a strip's scores and what else is in flight
    """
    a, s = up(A, 32 // itemsize), itemsize
    T, W, Z = blocks.tile, blocks.width, blocks.query_width
    held = 7 * s * a * W + (8 * s + 8) * a * Z + (12 + 2 * s) * a * W * blocks.key_tiles
    return held + 8 * T * Z + 3 * s * W * Z + 24 * T * blocks.columns + 2 * MIB


def bundles(blocks: Blocks) -> float:
    """Returns about how many cycles a head's forward and backward take.

    From static schedules of the two kernels: 22 instructions per register of scores,
    some more in small tiles whose latencies show, and some 1000 per step of both grids
    (an estimate).
    """
    steps = blocks.query_tiles * blocks.key_tiles
    return blocks.scores() / 1024 * (22 + 2300 / blocks.tile) + 1000 * steps


def candidates(L: int, K: int) -> list[int]:
    """Returns the tiles to choose from: equal parts of L or K, and powers of two."""
    parts = {size // n + 1 for size in (L - 1, K - 1) for n in range(1, K // LANES + 2)}
    return sorted({up(part, ROWS) for part in parts if part <= WIDEST} | {128, 256, 512})


def choose(device_kind: str, L: int, K: int, A: int, itemsize: int = 2) -> Blocks:
    """Returns the block sizes with the least work whose VMEM sum fits the chip.

    A tile costs its T * Z scores (on the diagonal, those before each 128 queries' last)
    whether its queries and keys are real or padding, so it is cut to fit: L = M = 150
    takes one tile of 304 keys and 256 queries, 1.8 times the 33,825 visible scores.
    """
    if device_kind not in VMEM:
        known = ", ".join(VMEM)
        raise UserError(
            f'kernel "tpu" has no block sizes for {device_kind!r} (it knows {known}): '
            'use model.kernel "chunked" or "xla"'
        )
    fitting = []
    for tile in candidates(L, K):
        blocks = Blocks(L, K, tile, LANES)
        Z = blocks.query_width
        blocks = blocks._replace(columns=256 if Z % 256 == 0 else Z)
        need = vmem_bytes(blocks, A, itemsize)
        if need <= VMEM[device_kind]:
            fitting.append(blocks._replace(vmem=max(DEFAULT_VMEM, need)))
    if not fitting:
        raise UserError(
            f'kernel "tpu" keeps the gradients of all {K} keys of a head in VMEM, '
            f'which {device_kind} has too little of: use model.kernel "chunked"'
        )
    return min(fitting, key=bundles)


def pad(x: Array, length: int) -> Array:
    """Pads the last axis in front, with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(length - x.shape[-1], 0)])


def cut(x: Array, blocks: Blocks, tiles: int, width: int) -> Array:
    """Cuts the last axis into tiles of so many lanes: [..., length] -> [..., P]."""
    if tiles == 1 or not blocks.empty:
        return pad(x, tiles * width)
    x = pad(x, tiles * blocks.tile).reshape(*x.shape[:-1], tiles, blocks.tile)
    return pad(x, width).reshape(*x.shape[:-2], -1)


def cut_queries(x: Array, blocks: Blocks) -> Array:
    """Cuts [..., L] into tiles of queries, [..., Q]."""
    return cut(x, blocks, blocks.query_tiles, blocks.query_width)


def cut_keys(x: Array, blocks: Blocks) -> Array:
    """Cuts [..., K] into tiles of keys, or of distances, [..., P]."""
    return cut(x, blocks, blocks.key_tiles, blocks.width)


def join_queries(x: Array, blocks: Blocks) -> Array:
    """Undoes `cut_queries`."""
    if blocks.query_tiles > 1 and blocks.empty:
        x = x.reshape(*x.shape[:-1], -1, blocks.width)[..., blocks.empty :]
        x = x.reshape(*x.shape[:-2], -1)
    return x[..., x.shape[-1] - blocks.L :]


class Visits(NamedTuple):
    """Which tiles a query tile visits; int32, kept in scalar memory."""

    deepest_BI: Array  # flat; the last d to visit
    clear_BI: Array  # flat; tiles d = 1 to clear need no mask


def visits(oldest_BL: Array, blocks: Blocks) -> tuple[Visits, Array]:
    """Returns the visits, and oldest_B1Q by lane, in the places of padded keys.

    Queries of padding, none of which makes a tile visited, see all keys behind them:
    what they compute is finite and is cut off.
    """
    front = ((0, 0), (blocks.hidden_queries, 0))
    oldest_BL = oldest_BL.astype(jnp.int32) + blocks.hidden_keys
    oldest_BQ = jnp.pad(oldest_BL, front, mode="edge")
    oldest_BIT = oldest_BQ.reshape(len(oldest_BL), -1, blocks.tile)
    diagonal_I = blocks.diagonal(jnp.arange(blocks.query_tiles))
    first_BI = oldest_BIT.min(2) // blocks.tile
    last_BI = -(-oldest_BIT.max(2) // blocks.tile)
    deepest_BI = jnp.clip(diagonal_I - first_BI, 0, diagonal_I)
    plan = Visits(deepest_BI.reshape(-1), (diagonal_I - last_BI).reshape(-1))
    return plan, cut_queries(oldest_BL[:, None], blocks)


class Specs(NamedTuple):
    """Which block of an operand a step of the grid sees."""

    query: pl.BlockSpec  # [B, H, A, Q]
    key: pl.BlockSpec  # [B, H, A, P]
    distance: pl.BlockSpec  # [H, A, P]
    bias: pl.BlockSpec  # [H, A, 1]
    row: pl.BlockSpec  # [B, H, 1, Q]
    oldest: pl.BlockSpec  # [B, 1, Q]
    all_keys: pl.BlockSpec  # [B, H, A, P], whole
    all_distances: pl.BlockSpec  # [H, A, P], whole


def specs(blocks: Blocks, A: int, order: Callable[..., tuple[Any, ...]]) -> Specs:
    """Returns the blocks of a grid whose indices `order` maps to (b, h, i, d)."""
    W, Z, P = blocks.width, blocks.query_width, blocks.width * blocks.key_tiles
    last = blocks.key_tiles - 1

    def spec(shape: tuple[int, ...], index: Callable[..., Any], **more: Any) -> Any:
        def at(g0: Any, g1: Any, g2: Any, g3: Any, deepest: Any, *_: Any) -> Any:
            b, h, i, d = order(g0, g1, g2, g3)
            d = jnp.minimum(d, deepest[b * blocks.query_tiles + i])
            return index(b, h, i, d)

        return pl.BlockSpec(shape, at, **more)

    # Blocks that stay for a whole head are not fetched ahead: one buffer is enough.
    once = {"pipeline_mode": pl.Buffered(1)}
    return Specs(
        query=spec((1, 1, A, Z), lambda b, h, i, d: (b, h, 0, i)),
        key=spec((1, 1, A, W), lambda b, h, i, d: (b, h, 0, blocks.diagonal(i) - d)),
        distance=spec((1, A, W), lambda b, h, i, d: (h, 0, last - d)),
        bias=spec((1, A, 1), lambda b, h, i, d: (h, 0, 0)),
        row=spec((1, 1, 1, Z), lambda b, h, i, d: (b, h, 0, i)),
        oldest=spec((1, 1, Z), lambda b, h, i, d: (b, 0, i)),
        all_keys=spec((1, 1, A, P), lambda b, h, i, d: (b, h, 0, 0), **once),
        all_distances=spec((1, A, P), lambda b, h, i, d: (h, 0, 0), **once),
    )
