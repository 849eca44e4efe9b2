"""The training loop: update, log, validate, save."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.save_restore import Checkpoints
from txl_jax.config import Config
from txl_jax.data.options import SLACK
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import OFF, Position, Streams
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate
from txl_jax.model.flops import needed_flops
from txl_jax.model.initializers import Params
from txl_jax.model.segment import Segment
from txl_jax.report.log import MetricsLog, Progress, SendLine
from txl_jax.report.timing import Trace, peak_flops
from txl_jax.report.viewers import Events
from txl_jax.runtime import distributed, preemption
from txl_jax.runtime.programs import Program, record_loops
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import check_streams, host_rows, place_segments
from txl_jax.update.state import Metrics, TrainState, Updater, abstract_segments
from txl_jax.update.step import REASONS, make_updater
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.resolve import NO_TOKENS, TokenIds
from txl_jax.workdir.staging import Staging

# Where a call starts or ends: the number of updates before, and the data's position.
Cursor = tuple[int, Position]
MOST_SKIPPED = 20  # updates in a row; a run that skips more does not recover


class TrainingParts(NamedTuple):
    """Everything that the updates of a run need."""

    config: Config  # fitted: with the vocabulary's size and ids
    mesh: Mesh
    updater: Updater
    # (position, S) -> (the S segments read there, the position after them).
    read_batch: Callable[[Position, int], tuple[Segment, Position]]
    evaluate: Evaluate
    valid_tokens: np.ndarray


def make_parts(
    config: Config,
    mesh: Mesh,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    ids: TokenIds,
) -> TrainingParts:
    """Returns the parts of a training on these tokens."""
    updater = make_updater(config.model, config.train, config.optim, mesh)
    rows = host_rows(mesh, config.train.batch_size, "train.batch_size")
    reset = ids.eval_reset
    evaluate = make_evaluate(config.model, config.eval, mesh, reset_memory_at=reset)
    streams = make_streams(config, train_tokens, rows, ids)
    return TrainingParts(config, mesh, updater, streams.batch, evaluate, valid_tokens)


def make_streams(
    config: Config,
    tokens: np.ndarray,
    rows: slice | np.ndarray,
    ids: TokenIds = NO_TOKENS,
) -> Streams:
    """Returns the streams `rows` of the training text."""
    train, types = config.train, config.model.vocab_size
    if train.score_from >= types:
        raise UserError(
            f"train.score_from = {train.score_from} must be below the vocabulary's "
            f"size, {types}: no target would be scored"
        )
    if train.reset_memory_at and ids.train_reset == OFF:
        raise UserError(
            f"train.reset_memory_at = {train.reset_memory_at!r} needs the token's id"
        )
    return Streams(
        tokens,
        train.batch_size,
        train.tgt_len,
        rows=rows,
        ext_len=train.ext_len,
        reset_memory_at=ids.train_reset,
        roll=train.order == "roll",
        varlen=train.varlen,
        half_loss=train.half_loss,
        score_from=train.score_from,
        seed=train.seed,
        sentence_end=ids.sentence_end,
        field="train.batch_size",
    )


def step_segments(config: Config, mesh: Mesh) -> Segment:
    """Returns the shapes and shardings of the segments of a training step.

    Raises UserError if the streams of a chunk do not divide over the mesh.
    """
    train = config.train
    L = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    S = train.segments_per_update
    S *= train.updates_of_call(config.checkpoint.every_steps)
    segments = abstract_segments(mesh, S, train.batch_size, L)
    streams = train.batch_size // train.batch_chunk
    check_streams(mesh, streams, "train.batch_size / batch_chunk")
    return segments


def train(
    parts: TrainingParts,
    workdir: Path,
    send_line: SendLine = lambda step, numbers: None,
    params: Params | None = None,
) -> Json:
    """Trains to config.train.num_steps, from the newest checkpoint if there is one.

    params: a fresh run's; None = random. Returns the number of updates, the steps whose
    save failed, and the seconds by purpose. Raises UserError if the last save failed,
    Interrupted after a signal, and BadNumbers if MOST_SKIPPED updates in a row are
    skipped. A resumed run repeats an interrupted validation.
    """
    with ExitStack() as stack:
        run = Run(parts, workdir, send_line, params, stack)
        step, _, position = run.start
        read = partial(read_call, parts)
        ahead = stack.enter_context(closing(prefetch(read, (step, position))))
        batches = (
            (place_segments(parts.mesh, segments), after)
            for segments, after in run.log.timing.inputs(ahead)
        )
        stack.enter_context(jax.transfer_guard("disallow"))
        # Innermost: after the loss of a process, leaving the contexts above would hang.
        stack.push(distributed.exit_on_error)
        return update_to_the_end(run, batches)


def update_to_the_end(run: "Run", batches: Iterator[tuple[Segment, Cursor]]) -> Json:
    """Makes all updates, and saves at every interval and validation; see `train`.

    The metrics of a call are fetched after the next call was dispatched, so the devices
    never wait for the host. Before a save, all metrics have been fetched.
    """
    config = run.parts.config
    step, state, position = run.start
    is_validation_due = config.train.is_validation_due
    if step and is_validation_due(step) and not run.checkpoints.has_validation(step):
        run.finish_step(step, state, position)
    while step < config.train.num_steps:
        segments, (next_step, position) = next(batches)
        state, step = run.dispatch(step, state, segments), next_step
        run.record(in_flight=1)
        ends = run.poll_end()
        is_save_due = step % config.checkpoint.every_steps == 0
        if ends or is_save_due or is_validation_due(step):
            run.record(in_flight=0)
            run.finish_step(step, state, position)
    run.checkpoints.finish(step)
    return {
        "updates": step,
        "failed_saves": run.checkpoints.failed,
        "total_seconds": run.log.timing.totals,
    }


class Run:
    """A training in progress, with its logs and checkpoints."""

    def __init__(
        self,
        parts: TrainingParts,
        workdir: Path,
        send_line: SendLine,
        params: Params | None,
        stack: ExitStack,
    ) -> None:
        """Opens the run's files, which `stack` closes, and restores its state."""
        config, enter = parts.config, stack.enter_context
        train = config.train
        self.parts, self.stop = parts, enter(preemption.listening())
        self.checkpoints = enter(Checkpoints(workdir, config.checkpoint))
        self.start = save_restore.restore_or_init(
            self.checkpoints, workdir, parts.updater, params
        )
        self.staging = enter(Staging(workdir, METRICS))
        folder, step = self.staging.folder, self.start.step
        B, L = train.batch_size, train.ext_len + train.tgt_len
        G = train.gradient_segments
        flops = needed_flops(config.model, B, L, training=True, together=G)
        peak = peak_flops(config.model.compute_dtype)
        events = enter(Events(folder, step))
        self.bar = enter(Progress("train", train.num_steps, step, unit=""))
        self.trace = enter(Trace(config.run.profile_from, step, folder / "profile"))
        log = MetricsLog(
            folder / METRICS,
            last_step=step,
            num_steps=train.num_steps,
            every=train.log_every,
            send=(events.scalars, send_line),
            ideal_seconds=train.segments_per_update * flops / peak,
            has_validation=step > 0 and self.checkpoints.has_validation(step),
        )
        self.log = enter(log)
        self.debug_nans: bool = jax.config.jax_debug_nans  # type: ignore[attr-defined]
        # The update at which too many in a row were skipped, which ends the run.
        self.bad: Json = {}
        self.step = Program(
            "the training step",
            parts.updater.step,
            carries=True,
            donates=True,
            options=record_loops([*parts.mesh.devices.flat]),
            timed=partial(log.timing.spend, "compile"),
        )
        # Calls whose metrics have not been fetched: (first step, metrics).
        self.calls: deque[tuple[int, Metrics]] = deque()

    def dispatch(self, step: int, state: TrainState, segments: Segment) -> TrainState:
        """Starts a call after `step` updates; compiles the first one of its shape."""
        self.trace.before(step, state)
        if self.debug_nans:
            # One operation at a time: the traceback shows where the first NaN arises.
            with jax.disable_jit(), jax.transfer_guard("allow"):
                state, metrics = self.parts.updater.step(state, segments)
        else:
            state, metrics = self.step(state, segments)
        self.calls.append((step, metrics))
        return state

    def record(self, in_flight: int) -> None:
        """Waits for all calls but the newest `in_flight`, and logs their metrics."""
        while len(self.calls) > in_flight:
            step, metrics = self.calls.popleft()
            fetched = fetch(metrics)
            self.bar(step + len(fetched), 0, *self.log.append(fetched))
            for number, update in enumerate(fetched, step + 1):
                if update["skipped_in_row"] >= MOST_SKIPPED and not self.bad:
                    self.bad = {"number": number, **update}

    def poll_end(self) -> bool:
        """Polls saves, and asks whether to end; all processes call it equally often."""
        self.checkpoints.poll()
        return self.stop.at_boundary() or bool(self.bad)

    def finish_step(self, step: int, state: TrainState, position: Position) -> None:
        """Validates a step if due, saves it, and ends the run if necessary.

        Raises BadNumbers if too many updates in a row were skipped.
        """
        valid_nll = None
        is_due = self.parts.config.train.is_validation_due(step)
        if is_due and not self.stop.reached:
            valid_nll = self.validate(state)
        if valid_nll is not None:
            self.log.log_validation(valid_nll)
        self.save(step, state, position, valid_nll)
        if self.bad and step not in self.checkpoints.failed:
            raise BadNumbers(
                f"update {self.bad['number']} was skipped, number "
                f"{self.bad['skipped_in_row']} in a row, since {self.bad['reason']}. "
                f"No skipped update has changed checkpoint {step}; with "
                "JAX_DEBUG_NANS=true, the same command stops at the operation that "
                "makes the first NaN"
            )
        if self.stop.reached:
            self.checkpoints.finish(step)
            raise self.stop.end(f"at update {step}, which is saved")

    def save(
        self, step: int, state: TrainState, position: Position, valid_nll: float | None
    ) -> None:
        """Starts to save a step when all lines are on the disk, or reports why not."""
        with (
            self.log.timing.spend("checkpoint"),
            jax.transfer_guard("allow"),  # orbax copies arrays to the host implicitly
            self.checkpoints.attempt(step),
        ):
            with distributed.together(*save_restore.errors()):
                self.log.sync()
                self.staging.upload()
            self.checkpoints.save(step, state, position, valid_nll)

    def validate(self, state: TrainState) -> float | None:
        """Returns the mean nll in nats; None if the run ends before it is complete."""
        with (
            self.log.timing.spend("evaluation"),
            suppress(Interrupted),
            Progress("valid") as bar,
        ):

            def show(done: int, total: int) -> None:
                bar(done, total)
                if self.poll_end():
                    raise self.stop.end("while evaluating")

            evaluate, text = self.parts.evaluate, self.parts.valid_tokens
            return evaluate(state.evaluated, text, show)["nll"]
        return None


def fetch(metrics: Metrics) -> list[Json]:
    """Waits for a call's metrics by update: the loop's only transfer to the host."""
    host = jax.device_get(metrics)
    fetched: list[Json] = [
        {name: values[u].item() for name, values in host.items()}
        for u in range(len(host["loss"]))
    ]
    return [{**update, "reason": REASONS[update["reason"]]} for update in fetched]


def read_call(parts: TrainingParts, start: Cursor) -> tuple[Segment, Cursor]:
    """Returns the segments of the call that starts at a cursor, and its end."""
    step, position = start
    train = parts.config.train
    U = train.updates_of_call(parts.config.checkpoint.every_steps, step)
    segments, position = parts.read_batch(position, U * train.segments_per_update)
    return segments, (step + U, position)
