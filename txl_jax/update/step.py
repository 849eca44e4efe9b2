"""The training step: U updates in a call to the devices, of G segments each.

The memory passes from segment to segment. Normally, G = train.segments_per_update = 1.
With train.gradient_segments above 1, that many are first joined into one long segment,
inside which gradients pass through the memory. With train.batch_chunk = C, a segment is
computed in chunks of B / C streams. (Elsewhere, G is the number of rare clusters.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from txl_jax.model import calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.memory.protocol import AnyMemory, MemoryLike
from txl_jax.model.segment import OneSegment, Segment, join, only
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import Tree, letters
from txl_jax.update.optim import (
    AddToAverage,
    Schedule,
    make_average,
    make_optimizer,
    make_schedule,
)
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Metrics, TrainState, TrainStep, Updater, init_state

# Indexed by `reason` in an update's metrics.
REASONS = (
    "",  # the update was made
    "its loss is not finite",
    "the norm of its gradient is not finite",
)


class Sums(NamedTuple):
    """Sums over the scored tokens of segments."""

    nll: Array  # in nats
    tokens: Array
    grads: Params


Carry = tuple[Sums, MemoryLike]
# (carry, a segment or a chunk of one, key) -> the carry, with its sums added
Add = Callable[[Carry, OneSegment, Array], Carry]


def make_updater(
    model_config: ModelConfig,
    config: TrainConfig,
    optim_config: OptimConfig,
    mesh: Mesh,
) -> Updater:
    """Returns the Updater of a run on the mesh."""
    optimizer = make_optimizer(optim_config, model_config.compute_dtype)
    add_to_average = make_average(optim_config)
    size, seed, averages = config.batch_size, config.seed, add_to_average is not None
    schedule = make_schedule(optim_config, config.num_steps)
    model = TransformerXL(model_config)
    step = make_train_step(model, optimizer, schedule, config, add_to_average)
    init, like = init_state(model_config, optimizer, size, seed, mesh, averages)
    return Updater(init, like, step)


def make_train_step(
    model: TransformerXL,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    config: TrainConfig,
    add_to_average: AddToAverage | None = None,
) -> TrainStep:
    """Returns train_step(state, segments [S, ..]) -> (state, metrics [U]).

    The loss of an update is the mean nll of its scored tokens, in nats. An update whose
    loss or gradient norm is not finite is skipped. A skipped update changes only the
    memory, which it empties, and the step count.
    """

    def update(state: TrainState, segments: Segment) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step)
        sums, memory = sum_gradients(
            model, state.params, state.memory, segments, key, config
        )
        # In a copying task, an update may have no scored token.
        tokens = jnp.maximum(sums.tokens, 1)
        loss = sums.nll / tokens
        # Computed twice, for the norm and for the optimizer: keeping the mean between
        # the two would store a second copy of all gradients.
        mean_grads = functools.partial(
            jax.tree.map, lambda grad: grad / tokens, sums.grads
        )
        grad_norm = optax.tree.norm(mean_grads())
        lr = jnp.asarray(schedule(state.step), jnp.float32)
        bad = [~jnp.isfinite(loss), ~jnp.isfinite(grad_norm)]
        reason = jnp.select(bad, [jnp.int32(1), jnp.int32(2)], jnp.int32(0))
        good = reason == 0

        def apply(state: TrainState) -> TrainState:
            grads = mean_grads()
            with jax.named_scope("optimizer"):
                updates, opt_state = optimizer.update(
                    grads, state.opt_state, state.params, grad_norm=grad_norm
                )
                params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
            if add_to_average:
                average = add_to_average(state.average, state.params, state.step)
                state = dataclasses.replace(state, average=average)
            return state

        def skip(state: TrainState) -> TrainState:
            fresh = choose_kind(model.config).empty(len(state.memory.filled_B))
            return dataclasses.replace(state, memory=fresh)

        state = dataclasses.replace(
            state,
            step=state.step + 1,
            memory=memory,
            skipped_in_row=jnp.where(good, 0, state.skipped_in_row + 1),
        )
        # With jnp.where, XLA:CPU would keep three copies of the parameters.
        state = jax.lax.cond(good, apply, skip, state)
        return state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": sums.tokens.astype(jnp.int32),
            "skipped": ~good,
            "reason": reason,
            "skipped_in_row": state.skipped_in_row,
        }

    return functools.partial(over_updates, update, config.segments_per_update)


def over_updates(
    update: TrainStep, G: int, state: TrainState, segments: Segment
) -> tuple[TrainState, Metrics]:
    """Makes one update for every G segments, in one scan."""
    each = jax.tree.map(lambda x: x.reshape(-1, G, *x.shape[1:]), segments)
    return jax.lax.scan(update, state, each)


def sum_gradients(
    model: TransformerXL,
    params: Params,
    memory: MemoryLike,
    segments: Segment,
    key: Array,
    config: TrainConfig,
) -> Carry:
    """Returns (the sums over the G segments of an update, the memory after them).

    Gradients have the dtype of `cast_layers`; a sum over several parts has the
    parameters' dtype. The key of chunk c of segment j is `fold_in(fold_in(key, j), c)`.
    """
    segments = join(segments, config.gradient_segments)
    segment_len = config.tgt_len if config.gradient_segments > 1 else 0
    used = cast_layers(params, model.config.compute_dtype)
    loss = functools.partial(nll_sum, model, segment_len=segment_len)

    def add_chunk(carry: Carry, segment: OneSegment, key: Array) -> Carry:
        total, memory = carry
        with jax.named_scope("forward_and_backward"):
            found, grads = jax.value_and_grad(loss, has_aux=True)(
                used, memory, segment, key
            )
        nll, (tokens, memory) = found
        return jax.tree.map(jnp.add, total, Sums(nll, tokens, grads)), memory

    C, zero = config.batch_chunk, jnp.zeros(())
    parts = C * len(segments.length_SB)
    zeros = jax.tree.map(jnp.zeros_like, params if parts > 1 else used)
    start = Sums(zero, zero, zeros)
    add_segment = functools.partial(over_chunks, add_chunk, C)
    return over_segments(add_segment, (start, memory), segments, key)


def over_segments(
    add_segment: Add, carry: Carry, segments: Segment, key: Array
) -> Carry:
    """Adds the segments; the memory passes from one to the next."""
    J = len(segments.length_SB)
    if J == 1:
        return add_segment(carry, only(segments), jax.random.fold_in(key, 0))

    def body(carry: Carry, xs: tuple[Array, OneSegment]) -> tuple[Carry, None]:
        j, segment = xs
        return add_segment(carry, segment, jax.random.fold_in(key, j)), None

    return jax.lax.scan(body, carry, (jnp.arange(J), OneSegment._make(segments)))[0]


def over_chunks(
    add_chunk: Add, C: int, carry: Carry, segment: OneSegment, key: Array
) -> Carry:
    """Adds a segment in C chunks of its streams, which saves memory."""
    if C == 1:
        return add_chunk(carry, segment, jax.random.fold_in(key, 0))

    def body(total: Sums, xs: tuple[Array, MemoryLike, OneSegment]) -> Carry:
        c, memory, segment = xs
        return add_chunk((total, memory), segment, jax.random.fold_in(key, c))

    total, memory = carry
    axes = stream_dimension((memory, segment))
    split = functools.partial(split_streams, C=C)
    xs = jnp.arange(C), *jax.tree.map(split, (memory, segment), axes)
    total, memory = jax.lax.scan(body, total, xs)
    return total, jax.tree.map(join_streams, memory, axes[0])


def nll_sum(
    model: TransformerXL,
    params: Params,
    memory: AnyMemory,
    segment: OneSegment,
    key: Array,
    segment_len: int = 0,
) -> tuple[Array, tuple[Array, AnyMemory]]:
    """Returns (nll of a segment's scored tokens in nats, (tokens, memory)).

    tokens: the number of scored tokens. segment_len: see `calls.read_segments`. Unlike
    `TransformerXL.nll`, `calls.nll_of_segments` also reads several joined segments.
    """
    result: Any = model.apply(
        {"params": params},
        segment.inputs_BL,
        segment.targets_BL,
        memory,
        first_BL=segment.first_BL,
        length_B=segment.length_B,
        segment_len=segment_len,
        method=calls.nll_of_segments,
        rngs={"dropout": key},
    )
    (nll_BL, memory), weights_BL = result, segment.weights_BL
    return jnp.sum(nll_BL * weights_BL), (jnp.sum(weights_BL), memory)


def cast_layers(params: Params, dtype: DTypeLike) -> Params:
    """Returns the parameters with the layers' matrices in dtype.

    The layers use them in this type only. Inside the scan over layers, each pass would
    cast them again.
    """

    def cast(x_N: Array) -> Array:
        return x_N.astype(dtype) if x_N.ndim > 2 else x_N

    return {**params, "layers": jax.tree.map(cast, params["layers"])}


def stream_dimension(tree: Tree) -> Tree:
    """Returns each array's dimension of streams, by the letters of its name."""
    return jax.tree.map(
        lambda spec: tuple(spec).index("B"),
        letters(tree),
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def split_streams(x: Array, axis: int, C: int) -> Array:
    """Returns x [.., B, ..] as C chunks [C, .., B / C, ..]; chunk c has streams c::C.

    Strided, so that every chunk takes its part of every shard of the streams and no
    stream moves between devices.
    """
    shape = (*x.shape[:axis], x.shape[axis] // C, C, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def join_streams(x: Array, axis: int) -> Array:
    """Inverts `split_streams`."""
    x = jnp.moveaxis(x, 0, axis + 1)
    B = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], B, *x.shape[axis + 2 :])
