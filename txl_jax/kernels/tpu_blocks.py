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

A T that is no multiple of 128 is padded, in front again, to W lanes, which is one.

The walk back from the diagonal ends at d = `deepest`, the tile of the least `oldest`
of the query tile. Tiles 1 to `clear` lie inside the interval of every query there:
they run a copy of the step that has no mask. Tiles that are not visited are not
copied either, because their index repeats the last one's.

Dims: B streams, L queries, K keys, H heads, A head, T rows of a tile, W its lanes,
I query tiles, Q and P the padded lengths of queries and of keys, in lanes.
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


class Blocks(NamedTuple):
    """The sizes of a call: all that a kernel is specialised for."""

    L: int
    K: int
    tile: int  # T
    columns: int  # of a strip: narrow ones spill fewer registers
    vmem: int = DEFAULT_VMEM

    @property
    def width(self) -> int:
        """W, the lanes of a tile."""
        return up(self.tile, LANES)

    @property
    def empty(self) -> int:
        """The lanes of padding in front of each tile."""
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
        starts = range(0, self.width, size)
        rows = [x + size - self.empty if on_diagonal else self.tile for x in starts]
        return [
            Strip(slice(x, x + size), x - self.empty, count)
            for x, count in zip(starts, rows, strict=True)
        ]

    def scores(self) -> int:
        """Returns how many scores a head computes for one stream with full memory."""
        count = 0
        for i in range(self.query_tiles):
            count += self.diagonal(i) * self.tile * self.width
            count += sum(strip.rows * LANES for strip in self.strips(True))
        return count


def vmem_bytes(blocks: Blocks, A: int, itemsize: int) -> int:
    """Returns what the backward kernel, the larger, holds in VMEM.

    With a = A rounded up to a register and s = itemsize:

        13 s a W + 8 a W            q, k, v, r, do, twice as they are fetched ahead;
                                    q + u, q + w, the last r; dq in two float32 parts
        (12 + 2 s) a W nk           dk, dv, dr in float32 and dk, dv as they leave
        8 T W + 3 s W W             carried products, float32; weights and gradients
        24 T columns + 2 MiB        a strip's scores and what else is in flight
    """
    a, s = up(A, 32 // itemsize), itemsize
    W, T = blocks.width, blocks.tile
    held = (13 * s + 8) * a * W + (12 + 2 * s) * a * W * blocks.key_tiles
    return held + 8 * T * W + 3 * s * W * W + 24 * T * blocks.columns + 2 * MIB


def bundles(blocks: Blocks) -> float:
    """Returns about how many cycles a head's forward and backward take.

    From static schedules of the two kernels: 22 instructions per register of scores,
    some more in small tiles whose latencies show, and some 1000 per step of both grids
    (an estimate).
    """
    steps = blocks.query_tiles * blocks.key_tiles
    return blocks.scores() / 1024 * (22 + 2300 / blocks.tile) + 1000 * steps


def choose(device_kind: str, L: int, K: int, A: int, itemsize: int = 2) -> Blocks:
    """Returns the block sizes with the least work whose VMEM sum fits the chip.

    A tile of T costs T * W score elements whether or not its queries and keys are
    real. So T is L cut into equal parts, or a power of two, whichever wastes least:
    L = M = 150 has one query tile of 160 and two key tiles, 1.9 times the 33,825
    scores that are visible.
    """
    if device_kind not in VMEM:
        known = ", ".join(VMEM)
        raise UserError(
            f'kernel "tpu" has no block sizes for {device_kind!r} (it knows {known}): '
            'use model.kernel "chunked" or "xla"'
        )
    parts = {up(-(-L // n), ROWS) for n in range(1, L // LANES + 2)}
    fitting = []
    for tile in sorted({T for T in parts if T <= WIDEST} | {128, 256, 384, 512}):
        columns = 256 if tile % 256 == 0 else up(tile, LANES)
        blocks = Blocks(L, K, tile, columns)
        need = vmem_bytes(blocks, A, itemsize)
        if need <= VMEM[device_kind]:
            fitting.append(blocks._replace(vmem=max(DEFAULT_VMEM, need)))
    if not fitting:
        raise UserError(
            f'kernel "tpu" keeps the gradients of all {K} keys of a head in VMEM, '
            f'which {device_kind} has too little of: use model.kernel "chunked"'
        )
    return min(fitting, key=bundles)


def cut(x: Array, tiles: int, blocks: Blocks) -> Array:
    """Cuts the last axis into tiles, padded in front: [..., length] -> [..., n W]."""

    def pad(x: Array, count: int) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(count, 0)])

    x = pad(x, tiles * blocks.tile - x.shape[-1])
    if not blocks.empty:
        return x
    x = pad(x.reshape(*x.shape[:-1], tiles, blocks.tile), blocks.empty)
    return x.reshape(*x.shape[:-2], -1)


def join(x: Array, length: int, blocks: Blocks) -> Array:
    """Undoes `cut`."""
    if blocks.empty:
        x = x.reshape(*x.shape[:-1], -1, blocks.width)[..., blocks.empty :]
        x = x.reshape(*x.shape[:-2], -1)
    return x[..., x.shape[-1] - length :]


class Visits(NamedTuple):
    """Which tiles a query tile visits; int32, kept in scalar memory."""

    deepest_BI: Array  # flat; the last d to visit
    clear_BI: Array  # flat; tiles d = 1 to clear need no mask


def visits(oldest_BL: Array, blocks: Blocks) -> tuple[Visits, Array]:
    """Returns the visits, and oldest_B1Q by lane, in the places of padded keys.

    Padding sees what the first query sees, so that it makes no tile visited. The
    bounds agree with `Strip.rows`: no query sees a key after its own.
    """
    front = ((0, 0), (blocks.hidden_queries, 0))
    oldest_BQ = jnp.pad(oldest_BL, front, mode="edge").astype(jnp.int32)
    oldest_BQ += blocks.hidden_keys
    oldest_BIT = oldest_BQ.reshape(len(oldest_BL), -1, blocks.tile)
    diagonal_I = blocks.diagonal(jnp.arange(blocks.query_tiles))
    first_BI = oldest_BIT.min(2) // blocks.tile
    last_BI = -(-oldest_BIT.max(2) // blocks.tile)
    deepest_BI = jnp.clip(diagonal_I - first_BI, 0, diagonal_I)
    plan = Visits(deepest_BI.reshape(-1), (diagonal_I - last_BI).reshape(-1))
    return plan, cut(oldest_BQ[:, None], blocks.query_tiles, blocks)


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
    W, P = blocks.width, blocks.width * blocks.key_tiles
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
        query=spec((1, 1, A, W), lambda b, h, i, d: (b, h, 0, i)),
        key=spec((1, 1, A, W), lambda b, h, i, d: (b, h, 0, blocks.diagonal(i) - d)),
        distance=spec((1, A, W), lambda b, h, i, d: (h, 0, last - d)),
        bias=spec((1, A, 1), lambda b, h, i, d: (h, 0, 0)),
        row=spec((1, 1, 1, W), lambda b, h, i, d: (b, h, 0, i)),
        oldest=spec((1, 1, W), lambda b, h, i, d: (b, 0, i)),
        all_keys=spec((1, 1, A, P), lambda b, h, i, d: (b, h, 0, 0), **once),
        all_distances=spec((1, A, P), lambda b, h, i, d: (h, 0, 0), **once),
    )
