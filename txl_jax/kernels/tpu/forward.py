"""The forward TPU kernel: attention of one query tile, one key tile at a time.

The softmax is online: each query has a running maximum and total, and the sum so far is
rescaled when the maximum grows (Milakov and Gimelshein 2018). Besides o the kernel
returns each query's log of the sum of exponentials, from which the backward kernel
recomputes the weights. Without terms by distance, their product and the skew are
omitted.

Dims: T rows of a tile, W its keys and Z its queries by lane, X the lanes of a strip, Y
the keys that it may see, Q all queries by lane.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.kernels.tpu import scores
from txl_jax.kernels.tpu.blocks import Blocks
from txl_jax.kernels.tpu.scores import LOG2E, dot
from txl_jax.kernels.tpu.tiles import Operands, scratch, specs
from txl_jax.kernels.xla import MASKED

f32 = jnp.float32


def front(x_YX: Array, rows: int) -> Array:
    """Pads the front with zero rows, for the padded lanes of the other operand."""
    zeros = jnp.zeros((rows, x_YX.shape[1]), x_YX.dtype)
    return jnp.concatenate([zeros, x_YX]) if rows else x_YX


def kernel(*refs: Any, blocks: Blocks, rate: float) -> None:
    """One key tile of one query tile; refs are inputs, results and scratch memory."""
    deepest_ref, clear_ref, counter_ref = refs[:3]
    q_ref, k_ref, v_ref, r_ref, u_ref, w_ref, oldest_ref, o_ref, lse_ref = refs[3:12]
    qu_ref, qw_ref, carried_ref, top_ref, total_ref, sum_ref = refs[12:]
    here = scores.place(blocks, deepest_ref, clear_ref)

    @pl.when(here.d == 0)
    def _() -> None:
        scores.prepare(q_ref, u_ref, w_ref, qu_ref, qw_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        # Erased by the first score; lanes without scores stay finite.
        total_ref[...] = jnp.ones_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def step(on_diagonal: bool, masked: bool) -> None:
        k_TA, r_TC = (scores.turn(ref, blocks) for ref in (k_ref, r_ref))
        for strip in blocks.strips(on_diagonal):
            at = strip.lanes
            score_YX = scores.score(
                strip, on_diagonal, k_TA, r_TC, qu_ref, qw_ref, carried_ref
            )
            if masked:
                seen_YX = scores.visible(strip, on_diagonal, here, blocks, oldest_ref)
                score_YX = jnp.where(seen_YX, score_YX, MASKED)
            top_1X = jnp.maximum(top_ref[:, at], score_YX.max(0, keepdims=True))
            weight_YX = jnp.exp2(score_YX - top_1X)
            shrink_1X = jnp.exp2(top_ref[:, at] - top_1X)
            top_ref[:, at] = top_1X
            total_1X = weight_YX.sum(0, keepdims=True)
            total_ref[:, at] = total_ref[:, at] * shrink_1X + total_1X
            if rate:
                keep_YX = scores.keep(strip, here, blocks, rate, counter_ref)
                weight_YX = jnp.where(keep_YX, weight_YX, 0.0)
            weight_WX = front(weight_YX.astype(v_ref.dtype), blocks.empty)
            v_AW = v_ref[0, 0, :, : blocks.empty + strip.rows]
            sum_AX = dot(v_AW, weight_WX, "AW,WX")
            sum_ref[:, at] = sum_ref[:, at] * shrink_1X + sum_AX

    scores.visit(here, step)

    @pl.when(here.d == blocks.key_tiles - 1)
    def _() -> None:
        o_AZ = sum_ref[...] / (total_ref[...] * (1 - rate))
        o_ref[0, 0] = o_AZ.astype(o_ref.dtype)
        lse_ref[0, 0] = top_ref[...] + jnp.log(total_ref[...]) * LOG2E


def forward(
    operands: Operands, blocks: Blocks, rate: float, interpret: Any
) -> tuple[Array, tuple[Operands, Array, Array]]:
    """Returns o_BHAQ and the residuals: the operands, o and lse_BH1Q, to base 2."""
    (B, H, A, Q), dtype = operands.q_BHAQ.shape, operands.q_BHAQ.dtype
    C, T, Z = operands.rows, blocks.tile, blocks.query_width
    spec = specs(blocks, operands)
    sizes = [((A, Z), dtype), ((C, Z), dtype), ((T if C else 0, Z), f32)]
    sizes += [((1, Z), f32)] * 2 + [((A, Z), f32)]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(H, B, blocks.query_tiles, blocks.key_tiles),
        in_specs=list(spec.operands()),
        out_specs=[spec.query, spec.row],
        scratch_shapes=scratch(*sizes),
    )
    call = pl.pallas_call(
        functools.partial(kernel, blocks=blocks, rate=rate),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct((B, H, A, Q), dtype),
            jax.ShapeDtypeStruct((B, H, 1, Q), f32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem,
        ),
        interpret=interpret,
        name="rel_attention_forward",
    )
    o_BHAQ, lse_BH1Q = (checkpoint_name(x, "o") for x in call(*operands))
    return o_BHAQ, (operands, o_BHAQ, lse_BH1Q)
