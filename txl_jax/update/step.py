"""The training step: a call to the devices, which makes several updates.

A call makes U updates, of train.segments_per_update segments each. An update sums
gradients over chunks of the streams, and a chunk reads its segments, between which the
memory passes. Normally an update has one segment and one chunk. train.gradient_segments
are first joined into one long segment, inside which gradients pass through the memory.
With train.batch_chunk above 1, each chunk is a smaller batch with its own memory.

Dims: S segments of a call, or of an update inside `update`; U updates, J joined
segments of an update, C chunks.
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

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
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
from txl_jax.update.state import Metrics, TrainState, Updater, init_state, jit_step

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


class Outcome(NamedTuple):
    """The number of scored tokens of a segment, and the memory after it."""

    tokens: Array
    memory: Memory


SumsAndMemory = tuple[Sums, Memory]
Loss = tuple[Array, Outcome]  # see `nll_sum`
Differentiate = Callable[[Memory, OneSegment, Array], tuple[Loss, Params]]


def make_updater(
    model_config: ModelConfig,
    config: TrainConfig,
    optim_config: OptimConfig,
    mesh: Mesh,
) -> Updater:
    """Returns the Updater of a run on the mesh."""
    optimizer = make_optimizer(optim_config, model_config.compute_dtype)
    schedule = make_schedule(optim_config, config.num_steps)
    average = make_average(optim_config)
    model = TransformerXL(model_config)
    step = TrainStep(model, optimizer, schedule, config, average)
    size, seed, averages = config.batch_size, config.seed, average is not None
    init, like = init_state(model_config, optimizer, size, seed, mesh, averages)
    return Updater(init, like, jit_step(step, like))


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A function (state, segments [S, ..]) -> (state, metrics [U])."""

    model: TransformerXL
    optimizer: optax.GradientTransformationExtraArgs
    schedule: Schedule
    config: TrainConfig
    add_to_average: AddToAverage | None = None

    def __call__(
        self, state: TrainState, segments: Segment
    ) -> tuple[TrainState, Metrics]:
        """Makes one update for every segments_per_update segments."""
        count = self.config.segments_per_update
        each = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), segments)
        return jax.lax.scan(self.update, state, each)

    def update(
        self, state: TrainState, segments: Segment
    ) -> tuple[TrainState, Metrics]:
        """Makes one update; its loss is the mean nll of the scored tokens, in nats.

        segments: those of the update, S = segments_per_update.

        An update whose loss or gradient norm is not finite is skipped: it changes only
        the memory, which it empties, and the counts of steps and of skipped updates.
        """
        key = jax.random.fold_in(state.rng, state.step)
        sums, memory = sum_gradients(
            self.model, state.params, state.memory, segments, key, self.config
        )
        # In a copying task, an update may have no scored token.
        tokens = jnp.maximum(sums.tokens, 1)
        loss = sums.nll / tokens
        grad_norm = optax.tree.norm(mean_gradient(sums.grads, tokens))
        lr = jnp.asarray(self.schedule(state.step), jnp.float32)
        bad = [~jnp.isfinite(loss), ~jnp.isfinite(grad_norm)]
        reason = jnp.select(bad, [jnp.int32(1), jnp.int32(2)], jnp.int32(0))
        good = reason == 0
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            memory=memory,
            skipped_in_row=jnp.where(good, 0, state.skipped_in_row + 1),
        )
        # With jnp.where, XLA:CPU would keep three copies of the parameters.
        of_gradient = sums.grads, tokens, grad_norm, lr
        state = jax.lax.cond(good, self.apply, self.skip, state, *of_gradient)
        return state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": sums.tokens.astype(jnp.int32),
            "skipped": ~good,
            "reason": reason,
            "skipped_in_row": state.skipped_in_row,
        }

    def apply(
        self,
        state: TrainState,
        grads: Params,
        tokens: Array,
        grad_norm: Array,
        lr: Array,
    ) -> TrainState:
        """Returns the state with new parameters; grads: summed over the tokens."""
        grads = mean_gradient(grads, tokens)
        with jax.named_scope("optimizer"):
            changes, opt_state = self.optimizer.update(
                grads, state.opt_state, state.params, grad_norm=grad_norm
            )
            params = jax.tree.map(lambda p, x: p - lr * x, state.params, changes)
        state = dataclasses.replace(state, params=params, opt_state=opt_state)
        if self.add_to_average:
            average = self.add_to_average(state.average, state.params, state.step)
            state = dataclasses.replace(state, average=average)
        return state

    def skip(self, state: TrainState, *_: object) -> TrainState:
        """Returns the state with an empty memory."""
        fresh = Memory.empty(self.model.config, len(state.memory.filled_B))
        return dataclasses.replace(state, memory=fresh)


def mean_gradient(grads: Params, tokens: Array) -> Params:
    """Divides by the number of tokens.

    An update does this twice, for the norm and for the optimizer: keeping the mean
    between the two would store a second copy of all gradients.
    """
    return jax.tree.map(lambda grad: grad / tokens, grads)


def sum_gradients(
    model: TransformerXL,
    params: Params,
    memory: Memory,
    segments: Segment,
    key: Array,
    config: TrainConfig,
) -> SumsAndMemory:
    """Returns (the sums over the segments of an update, the memory after them).

    If an update is one segment of one chunk, gradients have the dtypes that
    `cast_layers` gives; otherwise the parameters'.
    """
    segments = join(segments, config.gradient_segments)
    segment_len = config.tgt_len if config.gradient_segments > 1 else 0
    cast = cast_layers(params, model.config.compute_dtype)
    # (parameters, memory, segment, key) -> Loss, differentiated by the parameters
    loss = functools.partial(nll_sum, model, segment_len=segment_len)
    differentiate = functools.partial(jax.value_and_grad(loss, has_aux=True), cast)
    add_next_chunk = functools.partial(add_chunk, differentiate, key)
    C, zero = config.batch_chunk, jnp.zeros(())
    parts = C * len(segments.length_SB)
    zeros = jax.tree.map(jnp.zeros_like, params if parts > 1 else cast)
    sums = Sums(zero, zero, zeros)
    if C == 1:
        return add_next_chunk(sums, (0, memory, segments))
    axes = stream_dimension((memory, segments))
    split = functools.partial(split_streams, C=C)
    chunks = jax.tree.map(split, (memory, segments), axes)
    sums, memory = jax.lax.scan(add_next_chunk, sums, (jnp.arange(C), *chunks))
    return sums, jax.tree.map(join_streams, memory, axes[0])


def add_chunk(
    differentiate: Differentiate,
    key: Array,
    sums: Sums,
    chunk: tuple[int | Array, Memory, Segment],
) -> SumsAndMemory:
    """Adds the sums of one chunk, given as (number, memory, segments)."""
    c, memory, segments = chunk
    add_next = functools.partial(add_segment, differentiate, key, c)
    J = len(segments.length_SB)
    if J == 1:
        return add_next((sums, memory), (0, only(segments)))[0]
    each = jnp.arange(J), OneSegment._make(segments)
    return jax.lax.scan(add_next, (sums, memory), each)[0]


def add_segment(
    differentiate: Differentiate,
    key: Array,
    c: int | Array,
    carry: SumsAndMemory,
    numbered: tuple[int | Array, OneSegment],
) -> tuple[SumsAndMemory, None]:
    """Adds segment j of chunk c, whose key is `fold_in(fold_in(key, j), c)`."""
    (sums, memory), (j, segment) = carry, numbered
    key = jax.random.fold_in(jax.random.fold_in(key, j), c)
    with jax.named_scope("forward_and_backward"):
        (nll, outcome), grads = differentiate(memory, segment, key)
    sums = jax.tree.map(jnp.add, sums, Sums(nll, outcome.tokens, grads))
    return (sums, outcome.memory), None


def nll_sum(
    model: TransformerXL,
    params: Params,
    memory: Memory,
    segment: OneSegment,
    key: Array,
    segment_len: int = 0,
) -> Loss:
    """Returns (nll of a segment's scored tokens in nats, its outcome).

    segment_len: see `TransformerXL.__call__`.
    """
    result: Any = model.apply(
        {"params": params},
        segment.inputs_BL,
        segment.targets_BL,
        memory,
        first_BL=segment.first_BL,
        length_B=segment.length_B,
        segment_len=segment_len,
        method="nll",
        rngs={"dropout": key},
    )
    (nll_BL, memory), weights_BL = result, segment.weights_BL
    return jnp.sum(nll_BL * weights_BL), Outcome(jnp.sum(weights_BL), memory)


def cast_layers(params: Params, dtype: DTypeLike) -> Params:
    """Returns the parameters with the layers' matrices, stacked [N, ..], in dtype.

    The layers use them only in this dtype, except the matrices of fast weights, which
    keep theirs. Casting inside the scan would repeat it in each pass.
    """

    def cast(path: jax.tree_util.KeyPath, x_N: Array) -> Array:
        is_exact = x_N.ndim < 3 or jax.tree_util.DictKey("fast") in path
        return x_N if is_exact else x_N.astype(dtype)

    layers = jax.tree_util.tree_map_with_path(cast, params["layers"])
    return {**params, "layers": layers}


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
