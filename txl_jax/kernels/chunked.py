"""Attention by tiles, without storing any array of size L x K.

Queries are cut into Q blocks, padded in front. A block reads its tiles of keys backward
from its newest visible key. Only the first tile contains future keys; the last one
contains the oldest visible key of the block, and older tiles are skipped. With this
numbering, tile t has the same distances, a slab of r, in every block.

The softmax over tiles is online (Milakov and Gimelshein 2018; Dao et al. 2022). The
forward pass saves the output and, for each query, the log-sum-exp; the backward pass
recomputes the scores.

Dims: R = K distances; Q blocks of X queries, tiles of Y keys, Z distances in the slab
of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.hash import AttentionDropout, keep_index, start_BHL
from txl_jax.kernels.operands import Operands
from txl_jax.kernels.product import float32_product
from txl_jax.kernels.xla import (
    MASKED,
    pad_front,
    realign,
    repeat_farthest,
    with_bias,
)

Carry = TypeVar("Carry")  # of a loop


def choose_blocks(rows: int, L: int, K: int) -> tuple[int, int]:
    """Returns X and Y, at least X, for rows = streams x heads.

    Y keys need a slab of X + Y distances, so tiles are wider than tall: at least 128 x
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
    rate: float  # the dropout rate
    Q: int  # blocks of queries
    tiles: int  # in the last block, which has the most
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
    """A block's q + u and q + w; with a leading dimension Q, of all blocks."""

    content_HBXA: Array
    position_HBXA: Any = None  # an array if there are distances


class Rows(NamedTuple):
    """The visible keys of a block's queries; with a leading Q, of all blocks."""

    end: Array  # one past the newest key that the block sees
    oldest_BX: Array
    start_HBX: Array | None  # start of dropout's counter


class Keys(NamedTuple):
    """Keys, values and distances: of all blocks, padded in front, or of one tile."""

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
KEY_AXES = (2, 2, 1, 1)


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

    part_of_keys = Keys(*map(part, keys, start, (plan.Y, plan.Y, Z, Z), KEY_AXES))
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
    """Adds `part` to the slice of `keys` from which the tile was read."""

    def add(x: Any, part: Any, start: Array | int, axis: int) -> Any:
        if x is None:
            return None
        old = jax.lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
        return jax.lax.dynamic_update_slice_in_dim(x, old + part, start, axis)

    return Keys(*map(add, keys, part, tile.start, KEY_AXES))


def over_tiles(
    plan: Plan,
    keys: Keys,
    rows: Rows,
    add: Callable[[Carry, Tile], Carry],
    carry: Carry,
) -> Carry:
    """Folds `add` over all tiles of a block that have a visible key.

    The number of tiles depends on the data, so this loop is not differentiable.
    """
    carry = add(carry, read_tile(plan, keys, rows, 0, diagonal=True))
    if plan.tiles == 1:
        return carry

    def step(t: Array, carry: Carry) -> Carry:
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


Online = tuple[Array, Array, Array]  # o_HBXA, highest_HBX and total_HBX so far
Saved = tuple[Queries, Keys, Rows, Array, Array]  # with o_QHBXA and lse_QHBX


def shift(x_HBXZ: Array, Y: int) -> Array:
    """Re-indexes a tile's scores from distance to key."""
    return realign(pad_front(x_HBXZ, 1))[..., :Y]


def unshift(x_HBXY: Array, Z: int) -> Array:
    """Re-indexes from key to distance: the transpose of `shift`."""
    Y = x_HBXY.shape[-1]
    like = jax.ShapeDtypeStruct((*x_HBXY.shape[:-1], Z), x_HBXY.dtype)
    (x_HBXZ,) = jax.linear_transpose(functools.partial(shift, Y=Y), like)(x_HBXY)
    return x_HBXZ


def score(queries: Queries, tile: Tile) -> Array:
    """Returns the scores of a tile, score_HBXY in float32."""
    k_HBYA, _, r_HZA, bias_HZ = tile.keys
    score_HBXY = float32_product("HBXA,HBYA->HBXY", queries.content_HBXA, k_HBYA)
    H, _, X, Y = score_HBXY.shape
    if r_HZA is not None:
        score_HBXZ = float32_product("HBXA,HZA->HBXZ", queries.position_HBXA, r_HZA)
        score_HBXY += shift(score_HBXZ, Y)
    if bias_HZ is not None:
        bias_H11Z = bias_HZ[:, None, None].astype(jnp.float32)
        bias_H1XZ = jnp.broadcast_to(bias_H11Z, (H, 1, X, bias_HZ.shape[1]))
        score_HBXY += shift(bias_H1XZ, Y)
    score_HBXY *= queries.content_HBXA.shape[-1] ** -0.5
    return jnp.where(tile.visible_BXY, score_HBXY, MASKED)


def drop(plan: Plan, tile: Tile, x_HBXY: Array) -> Array:
    """Applies the tile's dropout to x."""
    if tile.keep_HBXY is None:
        return x_HBXY
    return jnp.where(tile.keep_HBXY, x_HBXY / (1 - plan.rate), 0)


def forward(
    plan: Plan, queries: Queries, keys: Keys, rows: Rows
) -> tuple[Array, Saved]:
    """Returns o_QHBXA and the residuals, with the scores' log-sum-exp lse_QHBX."""

    def attend_block(block: tuple[Queries, Rows]) -> tuple[Array, Array]:
        queries, rows = block

        def add(carry: Online, tile: Tile) -> Online:
            o_HBXA, highest_HBX, total_HBX = carry
            score_HBXY = score(queries, tile)
            before_HBX = highest_HBX
            highest_HBX = jnp.maximum(before_HBX, jnp.max(score_HBXY, axis=-1))
            weight_HBXY = jnp.exp(score_HBXY - highest_HBX[..., None])
            # 0 until the query has seen a key.
            shrink_HBX = jnp.exp(before_HBX - highest_HBX)
            total_HBX = total_HBX * shrink_HBX + jnp.sum(weight_HBXY, axis=-1)
            v_HBYA = tile.keys.v_HBKA
            weight_HBXY = drop(plan, tile, weight_HBXY).astype(v_HBYA.dtype)
            o_HBXA *= shrink_HBX[..., None]
            o_HBXA += float32_product("HBXY,HBYA->HBXA", weight_HBXY, v_HBYA)
            return o_HBXA, highest_HBX, total_HBX

        zero_HBXA = jnp.zeros(queries.content_HBXA.shape, jnp.float32)
        zero_HBX = zero_HBXA[..., 0]
        carry = (zero_HBXA, zero_HBX + MASKED, zero_HBX)
        o_HBXA, highest_HBX, total_HBX = over_tiles(plan, keys, rows, add, carry)
        o_HBXA = (o_HBXA / total_HBX[..., None]).astype(keys.v_HBKA.dtype)
        return o_HBXA, highest_HBX + jnp.log(total_HBX)

    results = jax.lax.map(attend_block, (queries, rows))
    o_QHBXA, lse_QHBX = (checkpoint_name(x, "o") for x in results)
    return o_QHBXA, (queries, keys, rows, o_QHBXA, lse_QHBX)


def backward(plan: Plan, saved: Saved, do_QHBXA: Array) -> tuple[Queries, Keys, None]:
    """Returns the gradients of `attend`, accumulated in float32; `rows` have none."""
    queries, keys, rows, o_QHBXA, lse_QHBX = saved
    # The sum over keys of weight times gradient of weight: a weight's gradient is
    # do . v, and the weighted sum of v is o.
    mean_QHBX = jnp.einsum(
        "QHBXA,QHBXA->QHBX", *(x.astype(jnp.float32) for x in (o_QHBXA, do_QHBXA))
    )

    def zeros(xs: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), xs)

    def rounded(dxs: Any, xs: Any) -> Any:
        return jax.tree.map(lambda dx, x: dx.astype(x.dtype), dxs, xs)

    def add_block(dkeys: Keys, block: Any) -> tuple[Keys, Queries]:
        queries, rows, *results = block

        def add(carry: tuple[Queries, Keys], tile: Tile) -> tuple[Queries, Keys]:
            dqueries, dkeys = carry
            more_queries, more_keys = tile_gradients(plan, queries, tile, *results)
            dqueries = jax.tree.map(jnp.add, dqueries, more_queries)
            return dqueries, add_tile(dkeys, tile, more_keys)

        carry = (zeros(queries), dkeys)
        dqueries, dkeys = over_tiles(plan, keys, rows, add, carry)
        return dkeys, rounded(dqueries, queries)

    blocks = (queries, rows, lse_QHBX, do_QHBXA, mean_QHBX)
    dkeys, dqueries = jax.lax.scan(add_block, zeros(keys), blocks)
    return dqueries, rounded(dkeys, keys), None


def tile_gradients(
    plan: Plan,
    queries: Queries,
    tile: Tile,
    lse_HBX: Array,
    do_HBXA: Array,
    mean_HBX: Array,
) -> tuple[Queries, Keys]:
    """Returns a tile's contribution to the gradients, in float32."""
    k_HBYA, v_HBYA, r_HZA, bias_HZ = tile.keys
    dtype = k_HBYA.dtype
    weight_HBXY = jnp.exp(score(queries, tile) - lse_HBX[..., None])
    dropped_HBXY = drop(plan, tile, weight_HBXY).astype(dtype)
    dv_HBYA = float32_product("HBXY,HBXA->HBYA", dropped_HBXY, do_HBXA)
    dweight_HBXY = drop(plan, tile, float32_product("HBXA,HBYA->HBXY", do_HBXA, v_HBYA))
    dscore_HBXY = weight_HBXY * (dweight_HBXY - mean_HBX[..., None])
    dscore_HBXY *= do_HBXA.shape[-1] ** -0.5
    # The products have the operands' dtype: float32 would be slower than bfloat16.
    short_HBXY = dscore_HBXY.astype(dtype)
    dcontent_HBXA = float32_product("HBXY,HBYA->HBXA", short_HBXY, k_HBYA)
    dk_HBYA = float32_product("HBXY,HBXA->HBYA", short_HBXY, queries.content_HBXA)
    dposition_HBXA = dr_HZA = dbias_HZ = None
    if r_HZA is not None:
        short_HBXZ = unshift(short_HBXY, r_HZA.shape[1])
        dposition_HBXA = float32_product("HBXZ,HZA->HBXA", short_HBXZ, r_HZA)
        dr_HZA = float32_product("HBXZ,HBXA->HZA", short_HBXZ, queries.position_HBXA)
    if bias_HZ is not None:
        dbias_HZ = jnp.sum(unshift(dscore_HBXY, bias_HZ.shape[1]), axis=(1, 2))
    dqueries = Queries(dcontent_HBXA, dposition_HBXA)
    return dqueries, Keys(dk_HBYA, dv_HBYA, dr_HZA, dbias_HZ)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, queries: Queries, keys: Keys, rows: Rows) -> Array:
    """Returns o_QHBXA."""
    return forward(plan, queries, keys, rows)[0]


attend.defvjp(forward, backward)


def rel_attention(operands: Operands, blocks: tuple[int, int] | None = None) -> Array:
    """Returns o_BLHA; see `xla.rel_attention`. `blocks` override X and Y."""
    q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout = operands
    B, L, H, A = q_BLHA.shape
    K = k_BKHA.shape[1]
    X, Y = blocks or choose_blocks(B * H, L, K)
    plan = make_plan(L, K, X, Y, dropout.rate if dropout else 0.0)
    r_RHA, u_HA, w_HA, bias_HR = repeat_farthest(position, K)
    queries = Queries(cut_queries(plan, with_bias(q_BLHA, u_HA)))
    if r_RHA is not None:
        position_QHBXA = cut_queries(plan, with_bias(q_BLHA, w_HA))
        queries = queries._replace(position_HBXA=position_QHBXA)
    keys = make_keys(plan, k_BKHA, v_BKHA, r_RHA, bias_HR)
    rows = make_rows(plan, H, oldest_BL, dropout)
    return join_queries(plan, attend(plan, queries, keys, rows))
