"""The forward TPU kernel: attention of one query tile, one key tile at a time.

The softmax is online (Milakov and Gimelshein 2018). Besides o the kernel returns each
query's log of the sum of exponentials, from which the backward kernel recomputes the
weights. Without terms by distance, their product and the skew are omitted.

Dims: as in `scores`; Q all queries by lane.
"""

import collections
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.kernels.tpu import scores
from txl_jax.kernels.tpu.blocks import Blocks, Interpret, Ref, Tiles, scratch, specs
from txl_jax.kernels.tpu.scores import LOG2E, dot
from txl_jax.kernels.xla import MASKED

f32 = jnp.float32


# The kernel's arguments, in the order of `pallas_call`.
Refs = collections.namedtuple(
    "Refs",
    "deepest clear counter q k v r u w oldest "  # inputs
    "o lse "  # results
    "qu qw carried top total sum",  # scratch
)


def front(x_YX: Array, rows: int) -> Array:
    """Pads the front with zero rows, for the padded lanes of the other operand."""
    zeros = jnp.zeros((rows, x_YX.shape[1]), x_YX.dtype)
    return jnp.concatenate([zeros, x_YX]) if rows else x_YX


def kernel(*args: Ref, blocks: Blocks, rate: float) -> None:
    """One key tile of one query tile."""
    refs = Refs(*args)
    here = scores.place(blocks, refs)

    @pl.when(here.d == 0)
    def _() -> None:
        scores.prepare(refs)
        refs.top[...] = jnp.full_like(refs.top, MASKED)
        # The first score replaces them; lanes without scores stay finite.
        refs.total[...] = jnp.ones_like(refs.total)
        refs.sum[...] = jnp.zeros_like(refs.sum)

    def step(on_diagonal: bool, masked: bool) -> None:
        k_TA, r_TC = (scores.turn(ref, blocks) for ref in (refs.k, refs.r))
        for strip in blocks.strips(on_diagonal):
            at = strip.lanes
            score_YX = scores.score(strip, on_diagonal, k_TA, r_TC, refs)
            if masked:
                seen_YX = scores.visible(strip, on_diagonal, here, blocks, refs)
                score_YX = jnp.where(seen_YX, score_YX, MASKED)
            top_1X = jnp.maximum(refs.top[:, at], score_YX.max(0, keepdims=True))
            weight_YX = jnp.exp2(score_YX - top_1X)
            shrink_1X = jnp.exp2(refs.top[:, at] - top_1X)
            refs.top[:, at] = top_1X
            total_1X = weight_YX.sum(0, keepdims=True)
            refs.total[:, at] = refs.total[:, at] * shrink_1X + total_1X
            if rate:
                keep_YX = scores.keep(strip, here, blocks, rate, refs)
                weight_YX = jnp.where(keep_YX, weight_YX, 0.0)
            weight_WX = front(weight_YX.astype(refs.v.dtype), blocks.empty)
            v_AW = refs.v[0, 0, :, : blocks.empty + strip.rows]
            sum_AX = dot(v_AW, weight_WX, "AW,WX")
            refs.sum[:, at] = refs.sum[:, at] * shrink_1X + sum_AX

    scores.visit(here, step)

    @pl.when(here.d == blocks.key_tiles - 1)
    def _() -> None:
        o_AZ = refs.sum[...] / (refs.total[...] * (1 - rate))
        refs.o[0, 0] = o_AZ.astype(refs.o.dtype)
        refs.lse[0, 0] = refs.top[...] + jnp.log(refs.total[...]) * LOG2E


def forward(
    tiles: Tiles, blocks: Blocks, rate: float, interpret: Interpret
) -> tuple[Array, tuple[Tiles, Array, Array]]:
    """Returns o_BHAQ and the residuals: the operands, o and lse_BH1Q, to base 2."""
    (B, H, A, Q), dtype = tiles.q_BHAQ.shape, tiles.q_BHAQ.dtype
    C, T, Z = tiles.rows, blocks.tile, blocks.query_width
    spec = specs(blocks, tiles)
    sizes = [((A, Z), dtype), ((C, Z), dtype), ((T if C else 0, Z), f32)]
    sizes += [((1, Z), f32)] * 2 + [((A, Z), f32)]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(H, B, blocks.query_tiles, blocks.key_tiles),
        in_specs=spec.operands,
        out_specs=[spec.query, spec.row],
        scratch_shapes=scratch(sizes),
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
    o_BHAQ, lse_BH1Q = (checkpoint_name(x, "o") for x in call(*tiles))
    return o_BHAQ, (tiles, o_BHAQ, lse_BH1Q)
