"""One call to the device: S segments, each an update or a part of one.

Dims: S segments in a call, U updates in a call, G segments in an update (S = U G),
C chunks of the streams, B streams, L segment, N layers, M memory, D model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from txl_jax.data.sentences import ORDERS
from txl_jax.data.streams import Segment
from txl_jax.errors import UserError, require, require_one_of
from txl_jax.guard import choose
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.optim import AddToAverage, Schedule
from txl_jax.state import TrainState


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; steps and cadences count updates."""

    seed: int = 1111  # of parameters, dropout and the data's order
    num_steps: int = 400_000  # updates of the whole run
    batch_size: int = 24  # streams
    tgt_len: int = 512  # tokens of a segment
    segments_per_call: int = 1  # segments that one call to the device takes
    segments_per_update: int = 1  # segments whose gradients make one update
    batch_chunk: int = 1  # parts of the streams computed one after the other
    log_every: int = 100  # updates between lines of metrics.jsonl
    eval_every: int = 4_000  # updates between validations
    max_bad_steps: int = 20  # skipped updates in a row that stop the run; see guard.py
    order: str = "stream"  # the text as it stands, or "sentences", shuffled each epoch
    sentence_end: int = -1  # id of the token that ends a sentence; -1 = none
    roll: bool = False  # each epoch, start every stream at a random place of its own
    varlen: bool = False  # draw the length of each segment, about tgt_len
    ext_len: int = 0  # tokens read again before each segment; needs model.mem_len = 0
    half_loss: bool = False  # score only the more recent half of each segment (Table 6)
    score_ids_from: int = 0  # targets with lower ids are not scored; 0 = all are
    reset_memory_at: int = -1  # id of the token after which a document starts; -1 = off
    max_loss_factor: float = 0.0  # skip a loss above this times the mean; 0 = off
    init_from: str = ""  # a workdir whose parameters a fresh run begins with; "" = none

    def __post_init__(self) -> None:
        """Refuses impossible values and combinations, naming the fields."""
        require(self, "train", 0, "seed", "ext_len", "score_ids_from")
        names = [field.name for field in dataclasses.fields(self)]
        counts = slice(names.index("num_steps"), names.index("order"))
        require(self, "train", 1, *names[counts])
        require(self, "train", -1, "sentence_end", "reset_memory_at")
        require_one_of(self.order, list(ORDERS), "train.order")
        self._check_sentences()
        if self.max_loss_factor and not self.max_loss_factor > 1:
            raise UserError(
                f"train.max_loss_factor = {self.max_loss_factor} must be above 1, for "
                "every second loss is above the mean, or 0, which is off"
            )
        if self.half_loss and self.ext_len:
            raise UserError(
                f"train.half_loss = True and train.ext_len = {self.ext_len} each score "
                "the recent part of what is read: set one of them alone"
            )
        if self.batch_size % self.batch_chunk:
            raise UserError(
                f"train.batch_size = {self.batch_size} must be a multiple of "
                f"train.batch_chunk = {self.batch_chunk}"
            )
        if self.segments_per_call % self.segments_per_update:
            raise UserError(
                f"train.segments_per_call = {self.segments_per_call} must be a "
                f"multiple of train.segments_per_update = {self.segments_per_update}"
            )
        for name in ("num_steps", "eval_every"):
            if getattr(self, name) % self.updates_per_call:
                raise UserError(
                    f"train.{name} = {getattr(self, name)} must be a multiple of the "
                    f"{self.updates_per_call} updates in one call "
                    "(train.segments_per_call / train.segments_per_update)"
                )

    def _check_sentences(self) -> None:
        if self.order != "sentences":
            return
        if self.sentence_end < 0:
            raise UserError(
                'train.order = "sentences" needs train.sentence_end, the id of the '
                "token that ends a sentence"
            )
        if self.roll:
            raise UserError(
                'train.roll = True and train.order = "sentences" each vary the order '
                "of the text: set one of them alone"
            )

    @property
    def updates_per_call(self) -> int:
        """U, the updates that one call to the device makes."""
        return self.segments_per_call // self.segments_per_update

    def validates(self, step: int) -> bool:
        """Returns whether a validation comes after update `step`."""
        return step == self.num_steps or step % self.eval_every == 0


@flax.struct.dataclass
class Total:
    """Sums over the segments and chunks of one update."""

    nll: Array  # nats
    tokens: Array
    grads: Any


def split_streams(x: Any, axis: int, C: int) -> Any:
    """Returns x [.., B, ..] as C chunks [C, .., B / C, ..]; chunk c has streams c::C.

    Strided, so that every chunk takes its part of every shard of the streams and no
    stream moves between devices.
    """
    shape = (*x.shape[:axis], x.shape[axis] // C, C, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def join_streams(x: Any, axis: int) -> Any:
    """Returns the chunks of `split_streams` put together again."""
    x = jnp.moveaxis(x, 0, axis + 1)
    B = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], B, *x.shape[axis + 2 :])


def segment_nll(
    model: TransformerXL,
    variables: Any,
    memory: Memory,
    segment: Segment,
    rngs: dict[str, Array],
) -> tuple[Array, Memory]:
    """Returns (nll_BL, memory) of one segment, scored or not."""
    return model.apply(  # type: ignore[return-value]
        variables,
        segment.inputs_SBL,
        segment.targets_SBL,
        memory,
        first_BL=segment.first_SBL,
        length_B=segment.length_SB,
        method="nll",
        rngs=rngs,
    )


# Of a segment's scored tokens, (params, memory, segment, key) -> (sum, memory).
NllSum = Callable[[Any, Memory, Segment, Array], tuple[Array, Memory]]

MEMORY_AXES = Memory(h_NBMD=1, filled_B=0)  # type: ignore[arg-type]


def sum_gradients(
    nll_sum: NllSum,
    params: Any,
    memory: Memory,
    group: Segment,
    key: Array,
    batch_chunk: int,
) -> tuple[Total, Memory]:
    """Returns the sums over the G segments of a group, and the memory after them.

    Each segment goes chunk after chunk, each with its streams' own memory.
    """
    G, C = group.length_SB.shape[0], batch_chunk
    grad = jax.value_and_grad(nll_sum, has_aux=True)

    def sum_chunk(key: Array, memory: Memory, segment: Segment) -> tuple[Total, Memory]:
        with jax.named_scope("forward_and_backward"):
            (nll, memory), grads = grad(params, memory, segment, key)
        return Total(nll, jnp.sum(segment.weights_SBL), grads), memory

    def accumulate(
        key: Array, total: Total, memory: Memory, segment: Segment
    ) -> tuple[Total, Memory]:
        def add_chunk(total: Total, xs: Any) -> tuple[Total, Memory]:
            c, memory, segment = xs
            chunk, memory = sum_chunk(jax.random.fold_in(key, c), memory, segment)
            return jax.tree.map(jnp.add, total, chunk), memory

        chunks = jax.tree.map(lambda x, a: split_streams(x, a, C), memory, MEMORY_AXES)
        parts = jax.tree.map(lambda x: split_streams(x, 0, C), segment)
        total, chunks = jax.lax.scan(add_chunk, total, (jnp.arange(C), chunks, parts))
        return total, jax.tree.map(join_streams, chunks, MEMORY_AXES)

    def add_segment(carry: Any, xs: Any) -> tuple[Any, None]:
        g, segment = xs
        total, memory = carry
        return accumulate(jax.random.fold_in(key, g), total, memory, segment), None

    zero = Total(jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add_segment, (zero, memory), (jnp.arange(G), group))[0]


def make_train_step(
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: TrainConfig,
    add_to_average: AddToAverage | None = None,
) -> Callable[[TrainState, Segment], tuple[TrainState, dict[str, Array]]]:
    """Returns train_step(state, segments [S, ..]) -> (state, metrics [U]).

    The loss of an update is the mean nll of its scored tokens, in nats. An update that
    `guard` finds bad is not made, in the optimiser's counts and the average neither,
    and the memory starts anew; it counts as a step, so the schedule goes on, and the
    metrics `skipped` and `reason` show it. add_to_average is None where the state has
    no average.
    """

    # optax's own take no norm.
    optimizer = optax.with_extra_args_support(optimizer)

    def nll_sum(
        params: Any, memory: Memory, segment: Segment, key: Array
    ) -> tuple[Array, Memory]:
        variables, rngs = {"params": params}, {"dropout": key}
        nll_BL, memory = segment_nll(model, variables, memory, segment, rngs)
        return jnp.sum(nll_BL * segment.weights_SBL), memory

    def update(
        state: TrainState, group: Segment
    ) -> tuple[TrainState, dict[str, Array]]:
        """Makes one update from the G segments of a group."""
        key = jax.random.fold_in(state.rng, state.step)
        total, memory = sum_gradients(
            nll_sum, state.params, state.memory, group, key, config.batch_chunk
        )
        # Segments may score nothing, where train.score_ids_from leaves much out.
        tokens = jnp.maximum(total.tokens, 1)
        loss = total.nll / tokens

        def mean_grads() -> Any:
            return jax.tree.map(lambda grad: grad / tokens, total.grads)

        grad_norm = optax.tree.norm(mean_grads())
        lr = jnp.asarray(schedule(state.step), jnp.float32)
        reason, guard = state.guard.judge(loss, grad_norm, config.max_loss_factor)
        good = reason == 0

        def make(params: Any, opt_state: Any, average: Any) -> tuple[Any, Any, Any]:
            with jax.named_scope("optimizer"):
                updates, opt_state = optimizer.update(
                    mean_grads(), opt_state, params, grad_norm=grad_norm
                )
                params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
            if add_to_average:
                average = add_to_average(average, params, state.step + 1)
            return params, opt_state, average

        def leave(*old: Any) -> tuple[Any, ...]:
            return old

        # Not a selection: for one, XLA:CPU keeps three copies of the parameters' size.
        params, opt_state, average = jax.lax.cond(
            good, make, leave, state.params, state.opt_state, state.average
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
            "tokens": total.tokens.astype(jnp.int32),
            "skipped": ~good,
            "reason": reason,
            "skipped_in_row": guard.skipped_in_row,
            "mean_loss": guard.mean_loss,
        }

    def train_step(
        state: TrainState, segments: Segment
    ) -> tuple[TrainState, dict[str, Array]]:
        def group(x: Any) -> Any:
            return x.reshape(-1, config.segments_per_update, *x.shape[1:])

        return jax.lax.scan(update, state, jax.tree.map(group, segments))

    return train_step


def make_eval_step(
    model: TransformerXL,
) -> Callable[[Any, Memory, Segment], tuple[Memory, Array]]:
    """Returns eval_step(params, memory, segments [S, ..]) -> (memory, nll_S).

    nll_S is the sum over the scored tokens of each segment, in nats.
    """

    def eval_step(
        params: Any, memory: Memory, segments: Segment
    ) -> tuple[Memory, Array]:
        def score(memory: Memory, segment: Segment) -> tuple[Memory, Array]:
            nll_BL, memory = segment_nll(model, {"params": params}, memory, segment, {})
            return memory, jnp.sum(nll_BL * segment.weights_SBL)

        return jax.lax.scan(score, memory, segments)

    return eval_step
