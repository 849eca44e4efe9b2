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
are added up. A larger G makes fewer updates per epoch, and a larger C takes less
memory; neither changes the tokens of an epoch.

Dims: S segments of a call, U its updates, G segments of an update (not clusters here),
C chunks, B streams, L segment, N layers, M memory, D model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from txl_jax.data.streams import Segment
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.guard import choose
from txl_jax.update.init import init_state
from txl_jax.update.optim import (
    AddToAverage,
    Schedule,
    make_average,
    make_optimizer,
    make_schedule,
)
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Program, TrainState, TrainStep


@flax.struct.dataclass
class Total:
    """Sums over the segments and chunks of one update."""

    nll: Array  # nats
    counts: dict[str, Array]  # see `make_nll_sum`
    grads: Any


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


Counts = dict[str, Array]
# (params, memory, segment, key) -> (summed nll in nats, (memory, counts)).
NllSum = Callable[[Any, Memory, Segment, Array], tuple[Array, tuple[Memory, Counts]]]

# The axis of the streams in each array.
MEMORY_AXES = Memory(h_NBMD=1, filled_B=0)  # type: ignore[arg-type]


def sum_gradients(
    nll_sum: NllSum,
    params: Any,
    memory: Memory,
    segments: Segment,
    key: Array,
    C: int,
    counts: Counts,
) -> tuple[Total, Memory]:
    """Returns the sums over the G segments of an update, and the memory after them.

    Segment g is computed chunk by chunk; chunk c has its streams' memory and the key
    `fold_in(fold_in(key, g), c)`. `counts` is the initial value of the counts.
    """
    G = segments.length_SB.shape[0]
    grad = jax.value_and_grad(nll_sum, has_aux=True)

    def add_chunk(carry: tuple[Total, Memory], xs: Any) -> tuple[Any, None]:
        (total, chunks), (g, c, segment) = carry, xs

        def take(chunks: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(chunks, c, keepdims=False)

        def put(chunks: Array, chunk: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(chunks, chunk, c, 0)

        memory = jax.tree.map(take, chunks)
        chunk_key = jax.random.fold_in(jax.random.fold_in(key, g), c)
        with jax.named_scope("forward_and_backward"):
            (nll, (memory, counts)), grads = grad(params, memory, segment, chunk_key)
        total = jax.tree.map(jnp.add, total, Total(nll, counts, grads))
        chunks = jax.tree.map(put, chunks, memory)
        return (total, chunks), None

    def split(x: Any) -> Any:
        x = jnp.moveaxis(split_streams(x, 1, C), 0, 1)
        return x.reshape(G * C, *x.shape[2:])

    total = Total(jnp.zeros(()), counts, jax.tree.map(jnp.zeros_like, params))
    chunks = jax.tree.map(lambda x, a: split_streams(x, a, C), memory, MEMORY_AXES)
    g, c = jnp.divmod(jnp.arange(G * C), C)
    xs = g, c, jax.tree.map(split, segments)
    (total, chunks), _ = jax.lax.scan(add_chunk, (total, chunks), xs)
    return total, jax.tree.map(join_streams, chunks, MEMORY_AXES)


def make_nll_sum(model: TransformerXL) -> NllSum:
    """Returns a function that sums the nll of a segment's scored tokens, in nats.

    The segment's arrays have no dimension S, inside a scan. Counts are the scored
    "tokens" and, by name, what modules sow as intermediates, in training nothing.
    """

    def nll_sum(
        params: Any, memory: Memory, segment: Segment, key: Array
    ) -> tuple[Array, tuple[Memory, Counts]]:
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
        counts = flax.traverse_util.flatten_dict(sown, sep="/")
        counts["tokens"] = jnp.sum(weights_BL)
        return jnp.sum(nll_BL * weights_BL), (memory, counts)

    return nll_sum


def make_update(
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainConfig,
    add_to_average: AddToAverage | None = None,
) -> TrainStep:
    """Returns update(state, segments [G, ..]) -> (state, metrics): one update."""
    # Most of optax's transformations do not accept grad_norm.
    optimizer = optax.with_extra_args_support(optimizer)
    nll_sum = make_nll_sum(model)

    def update(
        state: TrainState, segments: Segment
    ) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(state.rng, state.step)
        inputs = state.params, state.memory, segments, key, config.batch_chunk
        zero = {"tokens": jnp.zeros(())}
        total, memory = sum_gradients(nll_sum, *inputs, counts=zero)
        # In a copying task, all segments may be without a scored token.
        tokens = jnp.maximum(total.counts["tokens"], 1)
        loss = total.nll / tokens

        def mean_grads() -> Any:
            return jax.tree.map(lambda grad: grad / tokens, total.grads)

        grad_norm = optax.tree.norm(mean_grads())
        lr = jnp.asarray(schedule(state.step), jnp.float32)
        reason, guard = state.guard.judge(loss, grad_norm, config.max_loss_factor)
        good = reason == 0

        def apply(params: Any, opt_state: Any, average: Any) -> tuple[Any, Any, Any]:
            with jax.named_scope("optimizer"):
                updates, opt_state = optimizer.update(
                    mean_grads(), opt_state, params, grad_norm=grad_norm
                )
                params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
            if add_to_average:
                average = add_to_average(average, params, state.step + 1)
            return params, opt_state, average

        def skip(*old: Any) -> tuple[Any, ...]:
            return old

        # With jnp.where, XLA:CPU would keep three copies of the parameters.
        params, opt_state, average = jax.lax.cond(
            good, apply, skip, state.params, state.opt_state, state.average
        )
        fresh = Memory.empty(model.config, len(state.memory.filled_B))
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=choose(good, memory, fresh),
            average=average,
            guard=guard,
        )
        return state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": total.counts["tokens"].astype(jnp.int32),
            "skipped": ~good,
            "reason": reason,
            "skipped_in_row": guard.skipped_in_row,
            "mean_loss": guard.mean_loss,
        }

    return update


def make_train_step(
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainConfig,
    add_to_average: AddToAverage | None = None,
) -> TrainStep:
    """Returns train_step(state, segments [S, ..]) -> (state, metrics [U]).

    The loss of an update is the mean nll of its scored tokens, in nats. An update that
    `guard` finds bad is skipped: parameters, optimizer and average stay as they were
    and the memory is emptied. It counts as a step for the schedule; the metrics
    `skipped` and `reason` report it. add_to_average is None if the state has no
    average.
    """
    update = make_update(model, optimizer, schedule, config, add_to_average)

    def train_step(
        state: TrainState, segments: Segment
    ) -> tuple[TrainState, dict[str, Array]]:
        def group(x: Any) -> Any:
            return x.reshape(-1, config.segments_per_update, *x.shape[1:])

        return jax.lax.scan(update, state, jax.tree.map(group, segments))

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
