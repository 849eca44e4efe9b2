"""Attention by tiles, without storing any array of size L x K.

The softmax over tiles of keys is online (Milakov and Gimelshein 2018; Dao et al. 2022).
The forward pass saves the output and, for each query, the log-sum-exp; the backward
pass recomputes the scores.

Dims: those of `tiles`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.operands import Operands
from txl_jax.kernels.tiles import (
    Keys,
    Plan,
    Queries,
    Rows,
    Tile,
    add_tile,
    choose_blocks,
    cut_queries,
    join_queries,
    make_keys,
    make_plan,
    make_rows,
    over_tiles,
)
from txl_jax.kernels.xla import MASKED, product, rel_shift, repeat_farthest, with_bias

Online = tuple[Array, Array, Array]  # o_HBXA, highest_HBX and total_HBX so far
Saved = tuple[Queries, Keys, Rows, Array, Array]  # with o_QHBXA and lse_QHBX


def shift(x_HBXZ: Array, Y: int) -> Array:
    """Re-indexes a tile's scores from distance to key."""
    return rel_shift(x_HBXZ)[..., :Y]


def unshift(x_HBXY: Array, Z: int) -> Array:
    """Re-indexes from key to distance: the transpose of `shift`."""
    Y = x_HBXY.shape[-1]
    like = jax.ShapeDtypeStruct((*x_HBXY.shape[:-1], Z), x_HBXY.dtype)
    (x_HBXZ,) = jax.linear_transpose(functools.partial(shift, Y=Y), like)(x_HBXY)
    return x_HBXZ


def score(queries: Queries, tile: Tile) -> Array:
    """Returns the scores of a tile, score_HBXY in float32."""
    k_HBYA, _, r_HZA, bias_HZ = tile.keys
    score_HBXY = product("HBXA,HBYA->HBXY", queries.content_HBXA, k_HBYA)
    H, _, X, Y = score_HBXY.shape
    if r_HZA is not None:
        score_HBXZ = product("HBXA,HZA->HBXZ", queries.position_HBXA, r_HZA)
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
            o_HBXA += product("HBXY,HBYA->HBXA", weight_HBXY, v_HBYA)
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
    dv_HBYA = product("HBXY,HBXA->HBYA", dropped_HBXY, do_HBXA)
    dweight_HBXY = drop(plan, tile, product("HBXA,HBYA->HBXY", do_HBXA, v_HBYA))
    dscore_HBXY = weight_HBXY * (dweight_HBXY - mean_HBX[..., None])
    dscore_HBXY *= do_HBXA.shape[-1] ** -0.5
    # In the operands' dtype: float32 products are slow where bfloat16 is fast.
    short_HBXY = dscore_HBXY.astype(dtype)
    dcontent_HBXA = product("HBXY,HBYA->HBXA", short_HBXY, k_HBYA)
    dk_HBYA = product("HBXY,HBXA->HBYA", short_HBXY, queries.content_HBXA)
    dposition_HBXA = dr_HZA = dbias_HZ = None
    if r_HZA is not None:
        short_HBXZ = unshift(short_HBXY, r_HZA.shape[1])
        dposition_HBXA = product("HBXZ,HZA->HBXA", short_HBXZ, r_HZA)
        dr_HZA = product("HBXZ,HBXA->HZA", short_HBXZ, queries.position_HBXA)
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
