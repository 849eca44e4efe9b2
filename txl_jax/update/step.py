"""One call to the devices: S segments, U updates.

The segments of a call follow each other in the text. Each update takes G of them, and
each segment is computed in C chunks of the streams, one after the other:

    call      S = U G segments                     train.segments_per_call
    |- update 0    G segments                      train.segments_per_update
    |  |- segment 0    C chunks of B / C streams   train.batch_chunk
    |  |- segment 1
    |  `- ..
    |- update 1
    `- ..

The memory passes from segment to segment; the gradients of the G C parts of an update
are added up. Here G is not the number of rare clusters.
"""

import dataclasses
import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.init import init_state
from txl_jax.update.optim import (
    AddToAverage,
    Schedule,
    make_average,
    make_optimizer,
    make_schedule,
)
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Metrics, Program, TrainState, TrainStep


def split_streams(x: Any, axis: int, C: int) -> Any:
    """Returns x [.., B, ..] as C chunks [C, .., B / C, ..]; chunk c has streams c::C.

    Strided, so that every chunk takes its part of every shard of the streams and no
    stream moves between devices.
    """
    shape = (*x.shape[:axis], x.shape[axis] // C, C, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def join_streams(x: Any, axis: int) -> Any:
    """Returns the array whose chunks `split_streams` returned."""
    x = jnp.moveaxis(x, 0, axis + 1)
    B = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], B, *x.shape[axis + 2 :])


# The axis of the streams in each array.
MEMORY_AXES = Memory(h_NBMD=1, filled_B=0)  # type: ignore[arg-type]


def sum_gradients(
    model: TransformerXL,
    params: Any,
    memory: Memory,
    segments: Segment,
    key: Array,
    C: int,
) -> tuple[tuple[Array, Array, Any], Memory, dict[str, Array]]:
    """Returns ((nll, tokens, gradients), memory, sown) of G segments, see `nll_sum`.

    All but the memory are sums. Segment g is computed chunk by chunk; chunk c has its
    streams' memory and the key `fold_in(fold_in(key, g), c)`. Gradients have the dtype
    of `cast_layers`, their sum over several parts that of the parameters.
    """
    G = segments.length_SB.shape[0]
    used = cast_layers(params, model.config.compute_dtype)
    grad = jax.value_and_grad(functools.partial(nll_sum, model), has_aux=True)

    def add_chunk(carry: Any, xs: Any) -> tuple[Any, dict[str, Array]]:
        (total, chunks), (g, c, segment) = carry, xs
        memory = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, c, keepdims=False), chunks
        )
        chunk_key = jax.random.fold_in(jax.random.fold_in(key, g), c)
        with jax.named_scope("forward_and_backward"):
            (nll, aux), grads = grad(used, memory, segment, chunk_key)
        tokens, memory, sown = aux
        total = jax.tree.map(jnp.add, total, (nll, tokens, grads))
        chunks = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, c, 0),
            *(chunks, memory),
        )
        return (total, chunks), sown

    def split(x: Any) -> Any:
        x = jnp.moveaxis(split_streams(x, 1, C), 0, 1)
        return x.reshape(G * C, *x.shape[2:])

    zeros = jax.tree.map(jnp.zeros_like, params if G * C > 1 else used)
    zero = jnp.zeros(()), jnp.zeros(()), zeros
    chunks = jax.tree.map(lambda x, a: split_streams(x, a, C), memory, MEMORY_AXES)
    g, c = jnp.divmod(jnp.arange(G * C), C)
    xs = g, c, jax.tree.map(split, segments)
    (total, chunks), sown = jax.lax.scan(add_chunk, (zero, chunks), xs)
    sown = {name: jnp.sum(x, axis=0) for name, x in sown.items()}
    return total, jax.tree.map(join_streams, chunks, MEMORY_AXES), sown


def cast_layers(params: Any, dtype: Any) -> Any:
    """Returns the parameters with the layers' matrices in dtype.

    The layers use them in this type only. Inside the scan over layers, each pass would
    cast them again.
    """

    def cast(x_N: Array) -> Array:
        return x_N.astype(dtype) if x_N.ndim > 2 else x_N

    return {**params, "layers": jax.tree.map(cast, params["layers"])}


def nll_sum(
    model: TransformerXL, params: Any, memory: Memory, segment: Segment, key: Array
) -> tuple[Array, tuple[Array, Memory, dict[str, Array]]]:
    """Returns (nll of a segment's scored tokens in nats, (tokens, memory, sown)).

    The segment's arrays have no dimension S, inside a scan. tokens: the number of
    scored tokens. sown: what modules sow as intermediates, by name; {} in training.
    """
    (nll_BL, memory), sown = model.apply(
        {"params": params},
        segment.inputs_SBL,
        segment.targets_SBL,
        memory,
        first_BL=segment.first_SBL,
        length_B=segment.length_SB,
        method="nll",
        rngs={"dropout": key},
        mutable=["intermediates"],
    )
    weights_BL, sown = segment.weights_SBL, sown.get("intermediates", {})
    sown = flax.traverse_util.flatten_dict(sown, sep="/")
    return jnp.sum(nll_BL * weights_BL), (jnp.sum(weights_BL), memory, sown)


def make_train_step(
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainConfig,
    add_to_average: AddToAverage | None = None,
) -> TrainStep:
    """Returns train_step(state, segments [S, ..]) -> (state, metrics [U]).

    The loss of an update is the mean nll of its scored tokens, in nats. An update that
    `guard` finds bad only empties the memory and counts as a step of the schedule.
    """
    # Most of optax's transformations do not accept grad_norm.
    optimizer = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, segments: Segment) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step)
        parts = state.params, state.memory, segments, key, config.batch_chunk
        (nll, scored, grads), memory, _ = sum_gradients(model, *parts)
        # In a copying task, all segments may be without a scored token.
        tokens = jnp.maximum(scored, 1)
        loss = nll / tokens
        mean_grads = functools.partial(jax.tree.map, lambda grad: grad / tokens, grads)
        grad_norm = optax.tree.norm(mean_grads())
        lr = jnp.asarray(schedule(state.step), jnp.float32)
        reason, guard = state.guard.judge(loss, grad_norm, config.max_loss_factor)
        good = reason == 0

        def apply(state: TrainState) -> TrainState:
            with jax.named_scope("optimizer"):
                updates, opt_state = optimizer.update(
                    mean_grads(), state.opt_state, state.params, grad_norm=grad_norm
                )
                params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
            made = {"params": params, "opt_state": opt_state}
            if add_to_average:
                made["average"] = add_to_average(state.average, params, state.step)
            return dataclasses.replace(state, **made)

        def skip(state: TrainState) -> TrainState:
            fresh = Memory.empty(model.config, len(state.memory.filled_B))
            return dataclasses.replace(state, memory=fresh)

        state = dataclasses.replace(
            state, step=state.step + 1, memory=memory, guard=guard
        )
        # With jnp.where, XLA:CPU would keep three copies of the parameters.
        state = jax.lax.cond(good, apply, skip, state)
        return state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": scored.astype(jnp.int32),
            "skipped": ~good,
            "reason": reason,
            "skipped_in_row": guard.skipped_in_row,
            "mean_loss": guard.mean_loss,
        }

    def train_step(state: TrainState, segments: Segment) -> tuple[TrainState, Metrics]:
        G = config.segments_per_update
        grouped = jax.tree.map(lambda x: x.reshape(-1, G, *x.shape[1:]), segments)
        return jax.lax.scan(update, state, grouped)

    return train_step


def make_program(
    model_config: ModelConfig,
    config: TrainConfig,
    optim_config: OptimConfig,
    mesh: Mesh,
) -> Program:
    """Returns the jitted functions of a run on the mesh."""
    optimizer, average = make_optimizer(optim_config), make_average(optim_config)
    size, seed = config.batch_size, config.seed
    averages = average is not None
    init, places = init_state(model_config, optimizer, size, seed, mesh, averages)
    schedule = make_schedule(optim_config, config.num_steps)
    model = TransformerXL(model_config)
    train_step = make_train_step(model, optimizer, schedule, config, average)
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))
    return Program(init, places, jitted)
