"""The operands of the TPU kernels in tiles, and the tiles that a query tile visits.

The walk back from the diagonal ends at d = `deepest`, the tile of the query tile's
smallest `oldest`. Tiles 1 to `clear` are inside the interval of every query and need no
mask. Tiles that are not visited are not copied either: their index repeats the last.

Dims: T rows of a tile, W lanes of its keys, Z of its queries, I query tiles, C rows of
the product with distances, Q and P the lengths of queries and of keys in tiles, by
lane.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.kernels.tpu.blocks import Blocks, Ref
from txl_jax.kernels.xla import pad_front


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

    deepest: Array  # [B I], as `clear` is
    clear: Array
    counter_4: Array  # of dropout: seed, first stream, head and token
    q_BHAQ: Array
    k_BHAP: Array
    v_BHAP: Array
    r_HCP: Array | None  # without it, no term depends on the distance
    u_HA1: Array  # float32, as w is
    w_HA1: Array | None  # without it, r holds only a bias, and all its factors are 1
    oldest_B1Q: Array

    @property
    def rows(self) -> int:
        """C, or 0 without r."""
        return 0 if self.r_HCP is None else self.r_HCP.shape[1]


Corner = tuple[Array | int, ...]  # the place of a block, along each axis


class Specs(NamedTuple):
    """The block of each operand that a step of the grid sees."""

    operands: list[pl.BlockSpec | None]  # of q, k, v, r, u, w and oldest
    query: pl.BlockSpec  # [B, H, A, Q]
    row: pl.BlockSpec  # [B, H, 1, Q]
    gradients: list[pl.BlockSpec | None]  # of q, k, v, r, u and w


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
