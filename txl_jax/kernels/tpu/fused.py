"""Relative attention for TPUs of v5e and later: two fused kernels (section 3.3).

Scores, their shift, softmax, dropout and the product with the values stay in VMEM, tile
by tile. The repository's docs/tpu_kernel.md describes the parts.

Dims: R = K distances; C, Q and P as in `blocks`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Operands
from txl_jax.kernels.sharded import target_device
from txl_jax.kernels.tpu.backward import backward
from txl_jax.kernels.tpu.blocks import (
    ROWS,
    Blocks,
    Interpret,
    Tiles,
    choose,
    cut,
    cut_queries,
    join_queries,
    visits,
)
from txl_jax.kernels.tpu.forward import forward
from txl_jax.kernels.tpu.scores import LOG2E
from txl_jax.kernels.xla import repeat_farthest


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def tiled_attention(
    tiles: Tiles, blocks: Blocks, rate: float, interpret: Interpret
) -> Array:
    """Returns o_BHAQ."""
    return forward(tiles, blocks, rate, interpret)[0]


tiled_attention.defvjp(forward, backward)


def by_distance(
    r_RHA: Array | None, bias_HR: Array | None, A: int, dtype: DTypeLike
) -> Array | None:
    """Returns r_HCR, whose product with [ones; q + w] is the position term of a score.

    The first ROWS rows are the bias, as three numbers whose sum is exact to float32.
    Returns None if no term depends on the distance.
    """
    rows = []
    if bias_HR is not None:
        parts, rest_HR = [], bias_HR.astype(jnp.float32) * (LOG2E / math.sqrt(A))
        for _ in range(3):
            # XLA may omit a cast to bfloat16 and back, but not this.
            part_HR = jax.lax.reduce_precision(rest_HR, 8, jnp.finfo(dtype).nmant)
            parts.append(part_HR.astype(dtype))
            rest_HR -= part_HR
        empty = ((0, 0), (0, ROWS - len(parts)), (0, 0))
        rows.append(jnp.pad(jnp.stack(parts, 1), empty))
    if r_RHA is not None:
        rows.append(jnp.moveaxis(r_RHA.astype(dtype), -3, -1))
    return jnp.concatenate(rows, 1) if rows else None


def rel_attention(
    operands: Operands, *, blocks: Blocks | None = None, interpret: Interpret = False
) -> Array:
    """Returns o_BLHA; see `xla.rel_attention`.

    `blocks` override the sizes chosen for the device. With `interpret`, an argument of
    `pallas_call`, and given blocks, no TPU is needed.

    Raises UserError except on a TPU of v5e or later.
    """
    q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout = operands
    (_, L, H, A), K, dtype = q_BLHA.shape, k_BKHA.shape[1], q_BLHA.dtype
    r_RHA, u_HA, w_HA, bias_HR = repeat_farthest(position, K)
    r_HCR = by_distance(r_RHA, bias_HR, A, dtype)
    if blocks is None:
        features = A if r_HCR is None else max(A, r_HCR.shape[1])
        blocks = choose(target_device().device_kind, L, K, features, dtype.itemsize)
    dropout = dropout or AttentionDropout(0.0, jnp.uint32(0))
    counter = dropout.seed, dropout.stream0, dropout.head0
    counter_3 = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in counter])
    deepest, clear, oldest_B1Q = visits(oldest_BL, blocks)

    def turn(x: Array) -> Array:
        return jnp.moveaxis(x.astype(dtype), -3, -1)

    def cut_keys(x: Array) -> Array:
        return cut(x, blocks, blocks.key_tiles, blocks.width)

    def column(x_HA: Array | None) -> Array:
        x_HA = jnp.zeros((H, A)) if x_HA is None else x_HA
        return x_HA.astype(jnp.float32)[..., None]

    tiles = Tiles(
        deepest=deepest,
        clear=clear,
        counter_3=jax.lax.bitcast_convert_type(counter_3, jnp.int32),
        q_BHAQ=cut_queries(turn(q_BLHA), blocks),
        k_BHAP=cut_keys(turn(k_BKHA)),
        v_BHAP=cut_keys(turn(v_BKHA)),
        r_HCP=None if r_HCR is None else cut_keys(r_HCR),
        u_HA1=column(u_HA),
        w_HA1=None if r_RHA is None else column(w_HA),
        oldest_B1Q=oldest_B1Q,
    )
    o_BHAQ = tiled_attention(tiles, blocks, dropout.rate, interpret)
    return jnp.moveaxis(join_queries(o_BHAQ, blocks), -1, 1)
