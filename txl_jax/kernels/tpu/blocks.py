"""The tiles that the TPU kernels cut attention into, and the choice of their sizes.

Operands lie as [A, length], features down the rows, so that A = 64 is not padded to
the 128 lanes of a register; scores lie as [keys, queries]. Queries, keys and
distances are cut into tiles of the same T, with all padding in front. The last query
and the last key share a tile's last place, so query tile i has its diagonal in key
tile i + nk - nq, and d tiles further back it needs the tile nk - 1 - d of the
distances, whatever i (`docs/tpu_kernel.md` has a picture).

A tile is padded, again in front, to W lanes, the next multiple of 128. A tile of
queries also has Z = W lanes, unless all queries fit in one tile: then Z is L rounded up
to 128. So a short segment after a long memory has tall and narrow tiles, and a small
L + M needs only one tile.

Dims: T rows of a tile, W lanes of its keys, Z of its queries, I query tiles.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.experimental.pallas import tpu as pltpu

from txl_jax.errors import UserError
from txl_jax.kernels.skew import LANES

Ref = Any  # a block of an operand, a result or scratch memory, inside a kernel
Interpret = bool | pltpu.InterpretParams  # of `pallas_call`

# bfloat16 packs two rows into one of a register, so its registers have 16.
ROWS = 16
MIB = 2**20
# A kernel has 16 MiB of VMEM by default, and may request more of the 128 MiB of v5e and
# v6e or the 64 MiB of a v5p core. An eighth is left to XLA. v4 takes other kernels: it
# has 16 MiB in all, and no integer product for the hash of dropout.
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
    first: int  # index in the tile of its first lane; negative in padding
    rows: int  # the keys of the tile that these queries may see


class Blocks(NamedTuple):
    """The sizes that a kernel is specialised for."""

    L: int
    K: int
    tile: int  # T
    columns: int  # of a strip: narrow ones spill fewer registers
    query_tiles: int  # I, also called nq
    key_tiles: int  # of keys, and of distances; also called nk
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
        """Returns the scores that a head computes for one stream with a full memory."""
        count = 0
        for i in range(self.query_tiles):
            count += self.diagonal(i) * self.tile * self.query_width
            count += sum(strip.rows * LANES for strip in self.strips(True))
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
    # dk, dv, dr in float32, and dk, dv as they leave.
    held += (12 + 2 * s) * a * W * blocks.key_tiles
    held += 8 * T * Z + 3 * s * W * Z  # carried products; weights and gradients
    return held + 24 * T * blocks.columns + 2 * MIB  # a strip's scores, temporaries


def bundles(blocks: Blocks) -> float:
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


def fit(
    device_kind: str, L: int, K: int, A: int, itemsize: int, tile: int
) -> Blocks | None:
    """Returns the blocks of a tile size, or None if the chip's VMEM is too small."""
    blocks = make_blocks(L, K, tile, LANES)
    Z = blocks.query_width
    blocks = blocks._replace(columns=256 if Z % 256 == 0 else Z)
    need = vmem_bytes(blocks, A, itemsize)
    if need > VMEM[device_kind]:
        return None
    return blocks._replace(vmem=max(DEFAULT_VMEM, need))


def fit_all(
    device_kind: str, L: int, K: int, A: int, itemsize: int
) -> Iterator[Blocks]:
    """Yields the blocks of all tile sizes that fit into the chip's VMEM."""
    for tile in candidates(L, K):
        if blocks := fit(device_kind, L, K, A, itemsize, tile):
            yield blocks


def choose(device_kind: str, L: int, K: int, A: int, itemsize: int = 2) -> Blocks:
    """Returns the block sizes with the least work whose VMEM sum fits the chip.

    Raises UserError for an unknown chip, or if no size fits.
    """
    if device_kind not in VMEM:
        raise UserError(
            f'kernel "tpu" needs a TPU of v5e or later, not {device_kind!r} (it knows '
            f'{", ".join(VMEM)}): use model.kernel "xla" or "chunked"'
        )
    if not (fitting := [*fit_all(device_kind, L, K, A, itemsize)]):
        raise UserError(
            f'kernel "tpu" keeps the gradients of all {K} keys of a head in VMEM, '
            f'which {device_kind} has too little of: use model.kernel "chunked"'
        )
    return min(fitting, key=bundles)
