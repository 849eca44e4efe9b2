"""The backward TPU kernel: all gradients from one recomputation of the scores.

With p the weights, keep the dropout and do the gradient of the result,

    dp = v . do        ds = p (keep dp / (1 - rate) - o . do)        dv = do (keep p)
    dq = k . ds + r . unskew(ds)    dk = (q + u) . ds    dr = (q + w) . unskew(ds)

and du, dw are the two parts of dq, summed. All gradients but dq stay in VMEM, in
float32, while tiles and streams add to them. A product with a tile of distances belongs
to two tiles of keys (`scores`), so its gradient is complete one step later, and is then
flushed. Without r, dr and its inputs are omitted; without w, the second part of dq.

Dims: as in `scores`; Q and P all queries and all keys by lane.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.kernels.tpu import scores
from txl_jax.kernels.tpu.blocks import (
    LANES,
    Blocks,
    Interpret,
    Ref,
    Strip,
    Tiles,
    scratch,
    specs,
)
from txl_jax.kernels.tpu.scores import LOG2E, dot

f32 = jnp.float32


# The kernel's arguments, in the order of `pallas_call`.
Refs = collections.namedtuple(
    "Refs",
    "deepest clear counter q k v r u w oldest do lse delta "  # inputs
    "dq dk dv dr du dw "  # results
    # Scratch: content is k . ds and position r . unskew(ds), [A or C, Z] in float32.
    "qu qw content position "
    "last_r "  # [C, W]
    "carried carried_gradient "  # products, half of their gradient, [T, Z], float32
    "weight ds dproduct "  # [W, Z]; rows of padding are zero
    "dk_sum dv_sum",  # [A, P], float32
)


def begin(refs: Refs, here: scores.Place) -> None:
    """Clears each accumulator at the start of its sum."""
    tile = here.d == 0
    stream = tile & (here.i == 0)
    head = stream & (here.b == 0)

    def clear(when: Array, *to_clear: Ref) -> None:
        @pl.when(when)
        def _() -> None:
            for ref in jax.tree.leaves(to_clear):
                ref[...] = jnp.zeros_like(ref)

    clear(head, refs.dr, refs.du, refs.dw, refs.weight, refs.ds, refs.dproduct)
    clear(stream, refs.dk_sum, refs.dv_sum)
    clear(tile, refs.content, refs.position)


def write(ref: Ref, strip: Strip, blocks: Blocks, x_YX: Array) -> None:
    """Writes a strip's rows for keys, with zeros for keys in the future."""
    end = blocks.empty + strip.rows
    ref[blocks.empty : end, strip.lanes] = x_YX.astype(ref.dtype)
    if end < blocks.width:
        rest = jnp.zeros((blocks.width - end, x_YX.shape[1]), ref.dtype)
        ref[end:, strip.lanes] = rest


def flush(refs: Refs, blocks: Blocks, tile: Array) -> None:
    """Adds the gradients through the products with one tile of distances."""
    W = blocks.width
    lanes = pl.ds(pl.multiple_of(tile * W, LANES), W)
    if refs.w is not None:
        refs.position[...] += dot(refs.last_r[...], refs.dproduct[...], "CW,WZ")
    refs.dr[0, :, lanes] += dot(refs.qw[...], refs.dproduct[...], "CZ,WZ")


def step_strip(
    strip: Strip,
    on_diagonal: bool,
    masked: bool,
    keys: tuple[Ref, ...],
    refs: Refs,
    here: scores.Place,
    blocks: Blocks,
    rate: float,
) -> None:
    """Computes one strip's weights and gradients of scores and of products."""
    at, (k_TA, v_TA, r_TC) = strip.lanes, keys
    score_YX = scores.score(strip, on_diagonal, k_TA, r_TC, refs)
    weight_YX = jnp.exp2(score_YX - refs.lse[0, 0, :, at])
    if masked:
        seen_YX = scores.visible(strip, on_diagonal, here, blocks, refs)
        weight_YX = jnp.where(seen_YX, weight_YX, 0.0)
    dweight_YX = dot(v_TA[: strip.rows], refs.do[0, 0, :, at], "TA,AX")
    dropped_YX = weight_YX
    if rate:
        keep_YX = scores.keep(strip, here, blocks, rate, refs)
        dropped_YX = jnp.where(keep_YX, weight_YX, 0.0)
        dweight_YX = jnp.where(keep_YX, dweight_YX, 0.0)
    write(refs.weight, strip, blocks, dropped_YX)
    ds_YX = weight_YX * (dweight_YX - refs.delta[0, 0, :, at])
    write(refs.ds, strip, blocks, ds_YX)
    if r_TC is None:
        return
    dmerged_YX = scores.unskew(ds_YX, strip.first)
    if on_diagonal:
        refs.carried_gradient[blocks.tile - strip.rows :, at] = dmerged_YX
    else:
        dproduct_TX = scores.merge(
            refs.carried_gradient[:, at], dmerged_YX, strip.first
        )
        refs.dproduct[blocks.empty :, at] = dproduct_TX.astype(refs.dproduct.dtype)
        refs.carried_gradient[:, at] = dmerged_YX


def flush_last(refs: Refs, here: scores.Place, blocks: Blocks) -> None:
    """Flushes the carried gradients of the last visited tile."""

    @pl.when(here.d == here.deepest)
    def _() -> None:
        for strip in blocks.strips(on_diagonal=False):
            carried_TX = refs.carried_gradient[:, strip.lanes]
            far_TX = jnp.zeros_like(carried_TX)
            dproduct_TX = scores.merge(carried_TX, far_TX, strip.first)
            dproduct_TX = dproduct_TX.astype(refs.dproduct.dtype)
            refs.dproduct[blocks.empty :, strip.lanes] = dproduct_TX
        flush(refs, blocks, blocks.key_tiles - 1 - here.d)


def finish(refs: Refs, here: scores.Place, blocks: Blocks) -> None:
    """Writes the sums to the results."""
    A = refs.q.shape[2]
    tile = here.d == blocks.key_tiles - 1
    scale = 1 / math.sqrt(A)

    @pl.when(tile)
    def _() -> None:
        dq_AZ = content_AZ = refs.content[...]
        if refs.w is not None:
            position_AZ = refs.position[refs.r.shape[1] - A :]
            dq_AZ = content_AZ + position_AZ
        refs.dq[0, 0] = (dq_AZ * scale).astype(refs.dq.dtype)
        refs.du[0] += content_AZ.sum(1, keepdims=True) * scale
        if refs.w is not None:
            refs.dw[0] += position_AZ.sum(1, keepdims=True) * scale

    @pl.when(tile & (here.i == blocks.query_tiles - 1))
    def _() -> None:
        # q + u holds scores in units of log 2.
        refs.dk[0, 0] = (refs.dk_sum[...] / LOG2E).astype(refs.dk.dtype)
        refs.dv[0, 0] = refs.dv_sum[...].astype(refs.dv.dtype)


def kernel(*args: Ref, blocks: Blocks, rate: float) -> None:
    """One key tile of one query tile."""
    refs = Refs(*args)
    here = scores.place(blocks, refs)
    begin(refs, here)

    @pl.when(here.d == 0)
    def _() -> None:
        scores.prepare(refs)

    def step(on_diagonal: bool, masked: bool) -> None:
        keys = tuple(scores.turn(ref, blocks) for ref in (refs.k, refs.v, refs.r))
        for strip in blocks.strips(on_diagonal):
            step_strip(strip, on_diagonal, masked, keys, refs, here, blocks, rate)
        W = blocks.width
        lanes = pl.ds(pl.multiple_of(here.j * W, LANES), W)
        refs.dv_sum[:, lanes] += dot(refs.do[0, 0], refs.weight[...], "AZ,WZ")
        refs.dk_sum[:, lanes] += dot(refs.qu[...], refs.ds[...], "AZ,WZ")
        refs.content[...] += dot(refs.k[0, 0], refs.ds[...], "AW,WZ")
        if refs.r is not None and not on_diagonal:
            flush(refs, blocks, blocks.key_tiles - here.d)
        if refs.w is not None:
            refs.last_r[...] = refs.r[0]

    scores.visit(here, step)
    if refs.r is not None:
        flush_last(refs, here, blocks)
    finish(refs, here, blocks)


def backward(
    blocks: Blocks,
    rate: float,
    interpret: Interpret,
    saved: tuple[Tiles, Array, Array],
    do_BHAQ: Array,
) -> tuple[Tiles]:
    """Returns the gradients of the operands; integers have None.

    The factor 1 / (1 - rate) enters the weights through lse and is divided out of
    delta = o . do, so that dropout costs two selects per score.
    """
    tiles, o_BHAQ, lse_BH1Q = saved
    (B, H, A, Q), dtype = tiles.q_BHAQ.shape, tiles.q_BHAQ.dtype
    C, T, W, Z = tiles.rows, blocks.tile, blocks.width, blocks.query_width
    P = tiles.k_BHAP.shape[3]
    delta_BH1Q = (o_BHAQ.astype(f32) * do_BHAQ.astype(f32)).sum(2, keepdims=True)
    spec = specs(blocks, tiles)
    added = 0 if tiles.w_HA1 is None else C  # rows of the second part of dq
    sizes = [((A, Z), dtype), ((C, Z), dtype), ((A, Z), f32), ((added, Z), f32)]
    sizes += [((added, W), dtype)] + [((T if C else 0, Z), f32)] * 2
    sizes += [((W, Z), dtype)] * 2 + [((W if C else 0, Z), dtype)]
    sizes += [((A, P), f32)] * 2
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(H, B, blocks.query_tiles, blocks.key_tiles),
        in_specs=[*spec.operands, spec.query, spec.row, spec.row],
        out_specs=spec.gradients,
        scratch_shapes=scratch(sizes),
    )
    types = [dtype] * 3 + [f32] * 3
    # Padded operands are copies, so their gradients can reuse the memory.
    padded = (Q > blocks.L, P > blocks.K, P > blocks.K)
    call = pl.pallas_call(
        functools.partial(kernel, blocks=blocks, rate=rate),
        grid_spec=grid_spec,
        out_shape=[
            None if x is None else jax.ShapeDtypeStruct(x.shape, of)
            for x, of in zip(tiles[3:9], types, strict=True)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.vmem,
        ),
        input_output_aliases={3 + n: n for n in range(3) if padded[n]},
        interpret=interpret,
        name="rel_attention_backward",
    )
    lse_BH1Q += math.log2(1 - rate)
    floats = call(*tiles, do_BHAQ, lse_BH1Q, delta_BH1Q * (1 - rate))
    gradients = Tiles._make((None, None, None, *floats, None))
    if gradients.r_HCP is None:
        return (gradients,)
    return (gradients._replace(r_HCP=(gradients.r_HCP / LOG2E).astype(dtype)),)
