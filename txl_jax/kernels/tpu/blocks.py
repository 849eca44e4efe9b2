"""The tiles that the TPU kernels cut attention into, and the choice of their sizes.

Queries, keys and distances are cut into tiles of T, with all padding in front, so that
query tile i has its diagonal in key tile i + nk - nq, and d tiles further back it needs
the tile nk - 1 - d of the distances, whatever i (the repository's docs/tpu_kernel.md
has a picture). A tile is padded, again in front, to W lanes, the next multiple of 128.
A tile of queries also has Z = W lanes, unless all queries fit in one tile: then Z is L
rounded up to 128.

The walk back from the diagonal ends at d = `deepest`, the tile of the query tile's
smallest `oldest`. Tiles 1 to `clear` are inside the interval of every query and need no
mask. Tiles that are not visited are not copied either: their index repeats the last.

Dims: as in `scores`; I query tiles, Q and P all queries and all keys by lane.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.errors import UserError
from txl_jax.kernels.xla import pad_front

Ref = Any  # a block of an operand, a result or scratch memory, inside a kernel
Interpret = bool | pltpu.InterpretParams  # an argument of `pallas_call`

LANES = 128  # columns of a register
SUBLANES = 8  # rows of a register
ROWS = 16  # rows of a register in bfloat16
MIB = 2**20
# A kernel has 16 MiB of VMEM by default, and may request more of the 128 MiB of v5e and
# v6e or the 64 MiB of a v5p core. An eighth is left to XLA. A v4 uses other kernels: it
# has 16 MiB in total, and no integer product for the hash of dropout.
DEFAULT_VMEM = 16 * MIB
VMEM = {
    "TPU v5 lite": 112 * MIB,
    "TPU v5e": 112 * MIB,
    "TPU v5": 56 * MIB,
    "TPU v5p": 56 * MIB,
    "TPU v6 lite": 112 * MIB,
    "TPU v6e": 112 * MIB,
}
WIDEST = 512  # a wider tile compiles for minutes and gains nothing


def up(size: int, multiple: int) -> int:
    """Returns the size rounded up to a multiple."""
    return -(-size // multiple) * multiple


class Strip(NamedTuple):
    """Neighbouring queries of a tile that are processed together."""

    lanes: slice
    columns: int  # the number of queries
    first: int  # index of the first lane in the tile; negative in padding
    rows: int  # number of keys in the tile that these queries may see


class Blocks(NamedTuple):
    """The sizes that a kernel is specialised for."""

    L: int
    K: int
    tile: int  # T
    columns: int  # a strip's: narrow strips spill fewer registers
    query_tiles: int  # I, also called nq
    key_tiles: int  # for keys and for distances; also called nk
    width: int  # W, the lanes of a tile of keys
    query_width: int  # Z, the lanes of a tile of queries
    empty: int  # lanes of padding in front of each tile of keys
    hidden_queries: int  # padding in front of the first query
    hidden_keys: int  # padding in front of the first key
    vmem: int = DEFAULT_VMEM

    def diagonal(self, i: Any) -> Any:
        """Returns the key tile in which query tile i meets the diagonal."""
        return i + self.key_tiles - self.query_tiles

    def strips(self, on_diagonal: bool) -> list[Strip]:
        """Returns the strips of a tile; on the diagonal they see only earlier keys."""
        size = LANES if on_diagonal else self.columns
        strips = []
        for x in range(0, self.query_width, size):
            first = self.tile - self.query_width + x
            rows = first + size if on_diagonal else self.tile
            strips.append(Strip(slice(x, x + size), size, first, rows))
        return strips

    def scores(self) -> int:
        """The number of scores that a head computes for a stream with a full memory."""
        count = 0
        for i in range(self.query_tiles):
            count += self.diagonal(i) * self.tile * self.query_width
            count += sum(strip.rows * LANES for strip in self.strips(on_diagonal=True))
        return count


def make_blocks(L: int, K: int, tile: int, columns: int) -> Blocks:
    """Returns the sizes of L queries and K keys in tiles."""
    nq, nk, W = -(-L // tile), -(-K // tile), up(tile, LANES)
    Z = up(L, LANES) if nq == 1 else W
    return Blocks(
        L=L,
        K=K,
        tile=tile,
        columns=columns,
        query_tiles=nq,
        key_tiles=nk,
        width=W,
        query_width=Z,
        empty=W - tile,
        hidden_queries=nq * tile - L,
        hidden_keys=nk * tile - K,
    )


def vmem_bytes(blocks: Blocks, A: int, itemsize: int) -> int:
    """Returns the VMEM that the backward kernel, the larger one, needs."""
    a, s = up(A, 32 // itemsize), itemsize  # features fill whole registers
    T, W, Z = blocks.tile, blocks.width, blocks.query_width
    held = 7 * s * a * W  # k, v, r, twice as they are fetched ahead; the last r
    held += (8 * s + 8) * a * Z  # q, do, dq likewise; q + u, q + w; dq in two parts
    # dk, dv, dr in float32, and dk, dv in the operands' dtype.
    held += (12 + 2 * s) * a * W * blocks.key_tiles
    held += 8 * T * Z + 3 * s * W * Z  # carried products; weights and gradients
    return held + 24 * T * blocks.columns + 2 * MIB  # a strip's scores, temporaries


def cycles(blocks: Blocks) -> float:
    """Estimates the cycles of a head's forward and backward passes.

    They are bound by the vector units, so cycles are proportional to scores. Fitted to
    the compiler's schedules with dropout on v5e: 29 cycles per register of scores with
    T = 512, and 34 with T = 256, which hides less latency. The 1000 cycles per step of
    both grids are a guess.
    """
    steps = blocks.query_tiles * blocks.key_tiles
    return blocks.scores() / 1024 * (25 + 2400 / blocks.tile) + 1000 * steps


def candidates(L: int, K: int) -> list[int]:
    """Returns the candidate tile sizes: equal parts of L or K, and powers of two."""
    parts = {size // n + 1 for size in (L - 1, K - 1) for n in range(1, K // LANES + 2)}
    return sorted(
        {up(part, ROWS) for part in parts if part <= WIDEST} | {128, 256, 512}
    )


def choose(device_kind: str, L: int, K: int, A: int, itemsize: int = 2) -> Blocks:
    """Returns the block sizes with the least work whose VMEM sum fits the chip.

    Raises UserError for an unknown chip, or if no size fits.
    """
    if device_kind not in VMEM:
        raise UserError(
            f'kernel "tpu" needs a TPU of v5e or later, not {device_kind!r} (it knows '
            f'{", ".join(VMEM)}): use model.kernel "xla" or "chunked"'
        )
    fitting = []
    for tile in candidates(L, K):
        blocks = make_blocks(L, K, tile, LANES)
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
    return min(fitting, key=cycles)


def cut(x: Array, blocks: Blocks, tiles: int, width: int) -> Array:
    """Cuts the last axis into tiles of `width` lanes: [..., length] -> [..., P]."""
    if tiles == 1 or not blocks.empty:
        return pad_front(x, tiles * width - x.shape[-1])
    x = pad_front(x, tiles * blocks.tile - x.shape[-1])
    x = pad_front(x.reshape(*x.shape[:-1], tiles, blocks.tile), blocks.empty)
    return x.reshape(*x.shape[:-2], -1)


def cut_queries(x: Array, blocks: Blocks) -> Array:
    """Cuts [..., L] into tiles of queries, [..., Q]."""
    return cut(x, blocks, blocks.query_tiles, blocks.query_width)


def join_queries(x: Array, blocks: Blocks) -> Array:
    """Undoes `cut_queries`."""
    if blocks.query_tiles > 1 and blocks.empty:
        x = x.reshape(*x.shape[:-1], -1, blocks.width)[..., blocks.empty :]
        x = x.reshape(*x.shape[:-2], -1)
    return x[..., x.shape[-1] - blocks.L :]


def visits(oldest_BL: Array, blocks: Blocks) -> tuple[Array, Array, Array]:
    """Returns `deepest` and `clear` of each query tile, and oldest_B1Q in padded keys.

    Padded queries make no tile visited. They see the keys before them, so that their
    outputs, which are cut off, are finite.
    """
    front = ((0, 0), (blocks.hidden_queries, 0))
    oldest_BL = oldest_BL.astype(jnp.int32) + blocks.hidden_keys
    oldest_BQ = jnp.pad(oldest_BL, front, mode="edge")
    oldest_BIT = oldest_BQ.reshape(len(oldest_BL), -1, blocks.tile)
    diagonal_I = blocks.diagonal(jnp.arange(blocks.query_tiles))
    first_BI = oldest_BIT.min(2) // blocks.tile
    last_BI = -(-oldest_BIT.max(2) // blocks.tile)
    deepest_BI = jnp.clip(diagonal_I - first_BI, 0, diagonal_I)
    clear_BI = diagonal_I - last_BI
    oldest_B1Q = cut_queries(oldest_BL[:, None], blocks)
    return deepest_BI.reshape(-1), clear_BI.reshape(-1), oldest_B1Q


class Tiles(NamedTuple):
    """The inputs of both kernels, cut into tiles, and int32 in scalar memory first."""

    deepest: Array  # [B I], like `clear`
    clear: Array
    counter_3: Array  # for dropout: seed, first stream and head
    q_BHAQ: Array
    k_BHAP: Array
    v_BHAP: Array
    r_HCP: Array | None  # without it, no term depends on the distance
    u_HA1: Array  # float32, like w
    w_HA1: Array | None  # without it, r holds only a bias, and all its factors are 1
    oldest_B1Q: Array

    @property
    def rows(self) -> int:
        """C, or 0 without r."""
        return 0 if self.r_HCP is None else self.r_HCP.shape[1]


Corner = tuple[Array | int, ...]  # the place of a block, along each axis


class Specs(NamedTuple):
    """The blocks of the operands that a step of the grid sees."""

    operands: list[pl.BlockSpec | None]  # q, k, v, r, u, w and oldest
    query: pl.BlockSpec  # [B, H, A, Q]
    row: pl.BlockSpec  # [B, H, 1, Q]
    gradients: list[pl.BlockSpec | None]  # for q, k, v, r, u and w


def scratch(sizes: Sequence[tuple[tuple[int, ...], Any]]) -> list[Ref]:
    """Returns VMEM of each shape and type, and None for a shape without elements."""
    return [pltpu.VMEM(*size) if all(size[0]) else None for size in sizes]


def specs(blocks: Blocks, tiles: Tiles) -> Specs:
    """Returns the specs of both kernels' grid: heads, streams, query tiles, key tiles.

    Streams are inside heads, so that the backward kernel can sum over them in place.
    """
    W, Z, P = blocks.width, blocks.query_width, blocks.width * blocks.key_tiles
    A, C, last = tiles.q_BHAQ.shape[2], tiles.rows, blocks.key_tiles - 1

    def spec(shape: tuple[int, ...], index: Callable[..., Corner], **more: Any) -> Any:
        def at(h: Array, b: Array, i: Array, d: Array, deepest: Ref, *_: Ref) -> Corner:
            d = jnp.minimum(d, deepest[b * blocks.query_tiles + i])
            return index(b, h, i, d)

        return pl.BlockSpec(shape, at, **more) if all(shape) else None

    # Blocks that stay for a whole head are not prefetched: one buffer is enough.
    once = {"pipeline_mode": pl.Buffered(1)}
    query = spec((1, 1, A, Z), lambda b, h, i, d: (b, h, 0, i))
    key = spec((1, 1, A, W), lambda b, h, i, d: (b, h, 0, blocks.diagonal(i) - d))
    distance = spec((1, C, W), lambda b, h, i, d: (h, 0, last - d))
    u = spec((1, A, 1), lambda b, h, i, d: (h, 0, 0))
    w = None if tiles.w_HA1 is None else u
    oldest = spec((1, 1, Z), lambda b, h, i, d: (b, 0, i))
    all_keys = spec((1, 1, A, P), lambda b, h, i, d: (b, h, 0, 0), **once)
    all_distances = spec((1, C, P), lambda b, h, i, d: (h, 0, 0), **once)
    return Specs(
        operands=[query, key, key, distance, u, w, oldest],
        query=query,
        row=spec((1, 1, 1, Z), lambda b, h, i, d: (b, h, 0, i)),
        gradients=[query, all_keys, all_keys, all_distances, u, w],
    )
