"""A run: `plan` checks it, `Run.train` makes its updates, logs, validates and saves."""

import dataclasses
import time
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.checkpoint.save_restore import Checkpoints, Snapshot, restore_or_init
from txl_jax.config import Config
from txl_jax.data.files import require_apart
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import OFF, Position, Streams, check_length
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.generate.texts import find_prompts
from txl_jax.model.flops import needed_flops
from txl_jax.model.modules import Params
from txl_jax.model.segment import Segment
from txl_jax.report import viewers
from txl_jax.report.log import say
from txl_jax.report.metrics_log import MetricsLog, SendLine
from txl_jax.report.progress import Progress
from txl_jax.report.timing import Trace, peak_flops
from txl_jax.report.viewers import Events
from txl_jax.runtime import distributed, preemption, storage
from txl_jax.runtime.programs import compile_program, record_loops
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import check_streams, host_rows, place_segments
from txl_jax.update.state import (
    Metrics,
    TrainState,
    abstract_segments,
    parameter_count,
)
from txl_jax.update.step import REASONS, make_updater
from txl_jax.workdir import resolve, run_record
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.kernel_choice import choose_kernels
from txl_jax.workdir.load import initial_data, load_initial
from txl_jax.workdir.lock import locked
from txl_jax.workdir.resolve import NO_TOKENS, TokenIds
from txl_jax.workdir.staging import Staging

# Where a call starts or ends: the number of updates before, and the data's position.
Cursor = tuple[int, Position]
MOST_SKIPPED = 20  # updates in a row; a run that skips that many does not recover


def plan(config: Config, workdir: Path, keep_prompt: bool = False) -> "Run":
    """Returns a run that may start; writes nothing in the workdir.

    A prompt that the vocabulary lacks is replaced unless keep_prompt. Raises UserError
    if the config does not fit the corpus, the machine or the workdir.
    """
    data = initial_data(config, workdir)
    run_record.check_trainable(workdir, config)
    if config.data.path and not storage.is_remote(workdir):
        require_apart(config.data.path, workdir)
    tokens = prepare(data)
    vocab, split = tokens.vocab, config.eval.split
    # All processes verify the splits in the same order.
    texts = {x: tokens.split(x) for x in dict.fromkeys(("train", "valid", split))}
    distributed.require_equal({"the corpus": tokens.manifest["splits"]})
    if not keep_prompt:
        config = resolve.fit_prompt(config, vocab, texts["train"])
    fitted = resolve.fit_vocab(config, vocab)
    resolve.warn_of_rotations(fitted)
    ids = resolve.find_ids(fitted, vocab)
    for text in (texts["valid"], texts[split]):
        check_length(config.eval.cut(text), config.eval.streams, "eval.streams")
    if config.generate.prompt != "@-":  # stdin can be read once
        find_prompts(config.generate, vocab, texts[split], split)
    viewers.check_wandb(config.run.wandb)
    run = Run(fitted, workdir, texts["train"], texts["valid"], ids)
    # Some kernels refuse some shapes: tracing finds this before anything is written.
    if config.model.kernel not in ("auto", "xla"):
        run.updater.step.trace(run.updater.like, step_segments(fitted, run.mesh))
    like = run.updater.like.params
    run.params = load_initial(fitted, workdir, vocab, run.mesh, like)
    run.saved_config, run.tokens = config, tokens
    return run


class Run:
    """A training in a workdir.

    `__init__` makes the streams, the updater and the evaluation; `plan` adds the
    parameters and the run's record. Inside `with`, a run that `plan` returned owns its
    workdir, which it locks. `train` chooses the attention kernels, restores the state,
    opens the files and loops.
    """

    saved_config: Config  # `config` is fitted: with the vocabulary's size
    tokens: Tokens  # the corpus

    def __init__(
        self,
        config: Config,
        workdir: Path,
        train_tokens: np.ndarray,
        valid_tokens: np.ndarray,
        ids: TokenIds = NO_TOKENS,
    ) -> None:
        """Raises UserError if the config does not fit the machine."""
        self.config, self.workdir = config, workdir
        self.mesh = resolve.fit_mesh(config)
        rows = host_rows(self.mesh, config.train.batch_size, "train.batch_size")
        self.streams = make_streams(config, train_tokens, rows, ids)
        self.valid_tokens, self.ids = valid_tokens, ids
        self.use_kernels(config.model.kernel, config.model.kernel)
        self.params: Params | None = None  # of a fresh run; None = random
        self.send_line: SendLine = lambda step, numbers: None
        self.result: Json = {}

    def use_kernels(self, training: str, evaluation: str) -> None:
        """Makes the updater and the evaluation, each with an attention kernel."""
        config, mesh, reset = self.config, self.mesh, self.ids.eval_reset
        model = dataclasses.replace(config.model, kernel=training)
        self.updater = make_updater(model, config.train, config.optim, mesh)
        model = dataclasses.replace(config.model, kernel=evaluation)
        self.evaluate = make_evaluate(model, config.eval, mesh, reset_memory_at=reset)

    def __enter__(self) -> Self:
        """Locks the workdir, and records the run in it."""
        with ExitStack() as stack:
            with distributed.together():
                stack.enter_context(locked(self.workdir))
            with distributed.first_before_others():
                count = parameter_count(self.updater.like.params)
                start = run_record.claim(
                    self.workdir, self.saved_config, self.tokens, count
                )
            options = dataclasses.asdict(self.saved_config)
            wandb = self.config.run.wandb
            self.send_line = viewers.open_wandb(wandb, self.workdir, start, options)
            if (rise := self.config.optim.warmup_steps) > self.config.train.num_steps:
                say(
                    "lr rises until the last update, because optim.warmup_steps = "
                    f"{rise}"
                )
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def train(self) -> Json:
        """Trains to config.train.num_steps, from the newest checkpoint if there is one.

        Returns the number of updates, the steps whose save failed, and the seconds.
        Raises UserError if the last save failed, Interrupted after a signal, and
        BadNumbers if MOST_SKIPPED updates in a row are skipped. A resumed run repeats
        an interrupted validation.

        `step` counts updates; a call of `updater.step` makes several. Its metrics are
        fetched after the next call has been dispatched, so the devices wait for the
        host at validations and saves only, before which all are fetched.
        """
        if kernels := choose_kernels(self.config, self.workdir, self.mesh):
            self.use_kernels(**kernels)
        started, train = time.perf_counter(), self.config.train
        with ExitStack() as stack:
            step, state, position = self._restore_and_open(stack)
            has_validation = self.checkpoints.has_validation(step)
            batches = stack.enter_context(closing(self.batches(step, position)))
            stack.enter_context(jax.transfer_guard("disallow"))
            # Innermost: after the loss of a process, leaving the contexts above would
            # hang.
            stack.push(distributed.exit_on_error)
            if step and train.is_validation_due(step) and not has_validation:
                self.finish_step(step, state, position)
            while step < train.num_steps:
                segments, (next_step, position) = next(batches)
                state = self.dispatch(step, state, segments)
                step = next_step
                self.record(in_flight=1)
                is_save_due = step % self.config.checkpoint.every_steps == 0
                if self.poll_end() or is_save_due or train.is_validation_due(step):
                    self.record(in_flight=0)
                    self.finish_step(step, state, position)
            self.checkpoints.finish(step)
        self.result = {
            "updates": step,
            "failed_saves": self.checkpoints.failed,
            "total_seconds": self.log.timing.totals,
            "train_seconds": time.perf_counter() - started,
        }
        return self.result

    def _restore_and_open(self, stack: ExitStack) -> Snapshot:
        """Restores the state, and opens the run's files, which `stack` closes."""
        config, enter = self.config, stack.enter_context
        train = config.train
        self.stop = enter(preemption.listening())
        self.checkpoints = enter(Checkpoints(self.workdir, config.checkpoint.keep))
        first = restore_or_init(
            self.checkpoints, self.workdir, self.updater, self.params
        )
        self.staging = enter(Staging(self.workdir, METRICS))
        folder, step = self.staging.folder, first.step
        B, L = train.batch_size, train.ext_len + train.tgt_len
        together = train.gradient_segments
        flops = needed_flops(config.model, B, L, training=True, together=together)
        peak = peak_flops(config.model.compute_dtype)
        events = enter(Events(folder, step))
        self.bar = enter(Progress("train", train.num_steps, step, unit=""))
        self.trace = enter(Trace(config.run.profile_from, step, folder / "profile"))
        log = MetricsLog(
            folder / METRICS,
            last_step=step,
            num_steps=train.num_steps,
            every=train.log_every,
            send=(events.scalars, self.send_line),
            ideal_seconds=train.segments_per_update * flops / peak,
            has_validation=self.checkpoints.has_validation(step),
        )
        self.log = enter(log)
        # The update at which too many in a row were skipped, which ends the run.
        self.bad: Json = {}
        # By the number of segments: a full call, and a call of one update.
        self.compiled: dict[int, jax.stages.Compiled] = {}
        # Calls whose metrics have not been fetched: (first step, metrics).
        self.calls: deque[tuple[int, Metrics]] = deque()
        return first

    def batches(
        self, step: int, position: Position
    ) -> Generator[tuple[Segment, Cursor], None, None]:
        """Yields the segments of each call, on the devices, and the call's end."""
        with closing(prefetch(self.read_call, (step, position))) as ahead:
            for segments, end in self.log.timing.inputs(ahead):
                yield place_segments(self.mesh, segments), end

    def read_call(self, start: Cursor) -> tuple[Segment, Cursor]:
        """Returns the segments of the call that starts at a cursor, and its end."""
        step, position = start
        train = self.config.train
        U = train.updates_of_call(self.config.checkpoint.every_steps, step)
        segments, position = self.streams.batch(position, U * train.segments_per_update)
        return segments, (step + U, position)

    def dispatch(self, step: int, state: TrainState, segments: Segment) -> TrainState:
        """Starts the call after `step` updates."""
        self.trace.before(step, state)
        if jax.config.jax_debug_nans:  # type: ignore[attr-defined]
            # One operation at a time: the traceback shows where the first NaN arises.
            with jax.disable_jit(), jax.transfer_guard("allow"):
                state, metrics = self.updater.step(state, segments)
        else:
            state, metrics = self.compile(state, segments)(state, segments)
        self.calls.append((step, metrics))
        return state

    def compile(self, state: TrainState, segments: Segment) -> jax.stages.Compiled:
        """Returns the step for this number of segments, which is compiled once."""
        S = len(segments.length_SB)
        if S not in self.compiled:
            jax.block_until_ready(state)  # its computation is not timed
            with self.log.timing.spend("compile"):
                self.compiled[S] = compile_program(
                    "the training step",
                    self.updater.step,
                    *(state, segments),
                    options=record_loops([*self.mesh.devices.flat]),
                )
        return self.compiled[S]

    def record(self, in_flight: int) -> None:
        """Waits for all calls but the newest `in_flight`, and logs their metrics."""
        while len(self.calls) > in_flight:
            step, metrics = self.calls.popleft()
            updates = fetch(metrics)
            self.bar(step + len(updates), 0, *self.log.append(updates))
            for number, update in enumerate(updates, step + 1):
                if update["skipped_in_row"] >= MOST_SKIPPED and not self.bad:
                    self.bad = {"number": number, **update}

    def poll_end(self) -> bool:
        """Polls saves; returns whether to end. All processes call it equally often."""
        self.checkpoints.poll()
        return self.stop.at_boundary() or bool(self.bad)

    def finish_step(self, step: int, state: TrainState, position: Position) -> None:
        """Validates a step if due, saves it, and ends the run if necessary.

        Raises BadNumbers if too many updates in a row were skipped.
        """
        valid_nll = None
        if self.config.train.is_validation_due(step) and not self.stop.reached:
            valid_nll = self.validate(state)
        if valid_nll is not None:
            self.log.log_validation(valid_nll)
        with (
            self.log.timing.spend("checkpoint"),
            jax.transfer_guard("allow"),  # orbax copies arrays to the host implicitly
        ):
            self.checkpoints.save(step, state, position, valid_nll, self.flush_log)
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

    def flush_log(self) -> None:
        """Forces all lines of the log to disk, or uploads them."""
        self.log.sync()
        self.staging.upload()

    def validate(self, state: TrainState) -> float | None:
        """Returns the mean nll in nats; None if the run ends before it is complete."""

        def show(done: int, total: int) -> None:
            bar(done, total)
            if self.poll_end():
                raise self.stop.end("while evaluating")

        with (
            self.log.timing.spend("evaluation"),
            suppress(Interrupted),
            Progress("valid") as bar,
        ):
            return self.evaluate(state.evaluated, self.valid_tokens, show)["nll"]
        return None


def fetch(metrics: Metrics) -> list[Json]:
    """Waits for a call's metrics, by update: between saves the only transfer."""
    host = jax.device_get(metrics)
    updates: list[Json] = [
        {name: values[u].item() for name, values in host.items()}
        for u in range(len(host["loss"]))
    ]
    return [{**update, "reason": REASONS[update["reason"]]} for update in updates]


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
    S = train.segments_per_update
    S *= train.updates_of_call(config.checkpoint.every_steps)
    segments = abstract_segments(mesh, S, train.batch_size, config.train_width)
    streams = train.batch_size // train.batch_chunk
    check_streams(mesh, streams, "train.batch_size / batch_chunk")
    return segments
