"""The training loop: update, log, validate, save."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import Checkpoints, open_checkpoints
from txl_jax.checkpoint.save_restore import Snapshot
from txl_jax.config import Config
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import Position
from txl_jax.errors import Interrupted
from txl_jax.metrics import bits
from txl_jax.model.flops import needed_flops
from txl_jax.model.initializers import Params
from txl_jax.model.segment import Segment
from txl_jax.report.checksum import Json
from txl_jax.report.log import MetricsLog, say
from txl_jax.report.peak import peak_flops
from txl_jax.report.progress import Progress, compile_step, waiting
from txl_jax.report.tensorboard import Events, scalars
from txl_jax.report.trace import Trace
from txl_jax.runtime import distributed, preemption
from txl_jax.runtime.watchdog import Watchdog
from txl_jax.sharding.rules import place_segments
from txl_jax.update.bad_numbers import Diagnosis
from txl_jax.update.guard import explain
from txl_jax.update.state import Metrics, Program, TrainState
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.lock import Fence, unfenced
from txl_jax.workdir.staging import Staging

# (position, S) -> (the S segments read there, the position after them).
ReadBatch = Callable[[Position, int], tuple[Segment, Position]]
# Where a call starts: the number of updates before it, and its position in the data.
Place = tuple[int, Position]
# (params, progress) -> mean nll in nats; calls progress(done, total) between segments.
MeanNll = Callable[[Params, Callable[[int, int], None]], float]
# Called with (step, numbers by tag) of each new line of metrics.jsonl.
SendLine = Callable[[int, dict[str, float]], object]


class Training(NamedTuple):
    """Everything that the updates of a run need."""

    config: Config  # with the vocabulary's size and ids
    mesh: Mesh
    program: Program
    read_batch: ReadBatch
    mean_nll: MeanNll  # of the validation split
    params: Params | None = None  # that a fresh run starts from; None = random ones


class Call(NamedTuple):
    """A dispatched call: the step before it, and its results on the devices."""

    step: int
    metrics: Metrics
    segments: Segment


def train(
    training: Training,
    workdir: Path,
    fence: Fence = unfenced,
    send_line: SendLine = lambda step, numbers: None,
) -> Json:
    """Trains to config.train.num_steps, from the newest checkpoint if there is one.

    Returns the number of updates and the steps whose save failed. Raises UserError if
    the last save failed or another run has taken the workdir over, Interrupted after a
    signal, and BadNumbers if train.max_bad_steps updates in a row are skipped. A
    resumed run repeats an interrupted validation.
    """
    with ExitStack() as stack:
        run = Run(training, workdir, fence, send_line, stack)
        step, _, position = run.start
        read = partial(read_call, training.config, training.read_batch)
        ahead = stack.enter_context(closing(prefetch(read, (step, position))))
        batches = (
            (place_segments(training.mesh, segments), place)
            for segments, place in run.log.timing.inputs(ahead)
        )
        stack.enter_context(jax.transfer_guard("disallow"))
        # Innermost: after the loss of a process, leaving the contexts above would hang.
        stack.push(distributed.exit_on_error)
        return update_to_the_end(run, batches)


def update_to_the_end(run: "Run", batches: Iterator[tuple[Segment, Place]]) -> Json:
    """Makes all updates, and saves at every interval and validation; see `train`.

    The metrics of a call are fetched after the next call was dispatched, so the devices
    never wait for the host. Before a save, all metrics have been fetched.
    """
    config = run.training.config
    step, state, position = run.start
    if step and config.train.validates(step) and not run.checkpoints.validated(step):
        run.finish_step(step, state, position)
    before: Call | None = None
    while step < config.train.num_steps:
        segments, (next_step, position) = next(batches)
        state, metrics = run.dispatch(step, state, segments)
        if before is not None:
            run.record(before)
        before, step = Call(step, metrics, segments), next_step
        ends = run.at_boundary()
        is_due = step % config.checkpoint.every_steps == 0
        if ends or is_due or config.train.validates(step):
            run.record(before)
            before = None
            run.finish_step(step, state, position)
    run.checkpoints.finish(step)
    return {"updates": step, "failed_saves": run.checkpoints.failed}


class Run:
    """A training in progress: what it needs, and what observes and saves it."""

    def __init__(
        self,
        training: Training,
        workdir: Path,
        fence: Fence,
        send_line: SendLine,
        stack: ExitStack,
    ) -> None:
        """Opens the run's files, which `stack` closes, and restores its state."""
        config, enter = training.config, stack.enter_context
        self.training, self.stop = training, preemption.current()
        stack.callback(self.stop.release)
        self.watchdog = enter(Watchdog(config.run.hang_seconds))
        opened = open_checkpoints(workdir, config.checkpoint)
        self.checkpoints = enter(closing(opened))
        self.start = restore_or_begin(training, workdir, self.checkpoints)
        self.staging = enter(Staging(workdir, METRICS, fence=fence))
        folder, step = self.staging.folder, self.start.step
        events = enter(Events(folder, step))
        self.log = enter(open_log(config, folder, step, events, send_line))
        self.bar = enter(Progress("train", config.train.num_steps, step))
        self.trace = enter(Trace(config.run, folder / "profile"))
        self.diagnosis = Diagnosis(config.model, config.train)
        # The compiled step by the number of segments in a call.
        self.programs: dict[int, jax.stages.Compiled] = {}

    def dispatch(
        self, step: int, state: TrainState, segments: Segment
    ) -> tuple[TrainState, Metrics]:
        """Starts a call after `step` updates; compiles the first one of its shape."""
        self.trace.before(step, state)
        S = segments.length_SB.shape[0]
        if S not in self.programs:
            jax.block_until_ready(state)  # the call before is not compilation
            with self.log.timing.spend("compile"):
                self.programs[S] = compile_step(
                    "the training step", self.training.program.step, state, segments
                )
        results: tuple[TrainState, Metrics] = self.programs[S](state, segments)
        self.stop.hold()
        return results

    def record(self, call: Call) -> None:
        """Waits for a call, and logs the metrics of its updates."""
        updates = fetch(call.metrics)
        self.log.append(updates)
        loss, made = updates[-1]["loss"], call.step + len(updates)
        self.bar(
            made,
            loss=f"{loss:.4f}",
            bpc=f"{bits(loss):.4f}",
            tokens_per_s=f"{self.log.tokens_per_second:,.0f}",
            mfu=f"{self.log.mfu:.1%}",
        )
        self.diagnosis.fetched(call.step, updates, call.segments)

    def at_boundary(self) -> bool:
        """Returns whether the run has to save and end here.

        Called between calls and during a validation, equally often in all processes.
        """
        self.watchdog.feed()
        self.checkpoints.poll()
        return self.stop.at_boundary() or self.diagnosis.ends()

    def finish_step(self, step: int, state: TrainState, position: Position) -> None:
        """Validates a step if that is due, saves it, and ends the run if it has to."""
        is_due = self.training.config.train.validates(step)
        valid_nll = self.validate(state) if is_due and not self.stop.reached else None
        self.save(step, state, position, valid_nll, is_due and valid_nll is None)
        if self.stop.reached:
            self.checkpoints.finish(step)
            raise self.stop.end(f"at update {step}, which is saved")

    def validate(self, state: TrainState) -> float | None:
        """Returns the mean nll in nats; None if the run ends before it is complete."""

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if self.at_boundary():
                raise self.stop.end("while validating")

        with self.log.timing.spend("evaluation"), Progress("valid") as bar:
            try:
                return self.training.mean_nll(state.evaluated, progress)
            except Interrupted:
                return None

    def save(
        self,
        step: int,
        state: TrainState,
        position: Position,
        valid_nll_nats: float | None,
        owed: bool,
    ) -> None:
        """Writes all lines to disk, then starts to save the step.

        owed: the step has yet to be validated. Raises BadNumbers if too many updates in
        a row were skipped.
        """
        # orbax copies arrays to the host implicitly.
        with self.log.timing.spend("checkpoint"), jax.transfer_guard("allow"):
            with self.checkpoints.attempt(step):
                with distributed.together(*self.checkpoints.errors):
                    self.log.sync(valid_nll_nats, owed)
                    self.staging.upload()
                save_restore.save(
                    self.checkpoints, step, state, position, valid_nll_nats
                )
            if step not in self.checkpoints.failed:
                self.diagnosis.raise_if_found(state)


def fetch(metrics: Metrics) -> list[Json]:
    """Waits for the metrics of a call, and returns those of each update.

    The loop's only transfer of metrics to the host.
    """
    host = jax.device_get(metrics)
    return [
        explain({name: values[u].item() for name, values in host.items()})
        for u in range(len(host["loss"]))
    ]


def restore_or_begin(
    training: Training, workdir: Path, checkpoints: Checkpoints
) -> Snapshot:
    """Returns the newest checkpoint, or the fresh state of a run."""
    program, params = training.program, training.params
    like = save_restore.abstract(jax.eval_shape(program.init), program.shardings)
    if resumed := save_restore.restore(checkpoints, like):
        say(f"resumed at update {resumed.step} from {checkpoints.directory}")
        return resumed
    say(f"fresh run in {workdir}")
    with waiting("compiling and computing the initial parameters"):
        state = program.init()
    if params is not None:
        state = state.start_from(jax.device_put(params, program.shardings.params))
    return Snapshot(0, state, Position())


def read_call(
    config: Config, read_batch: ReadBatch, place: Place
) -> tuple[Segment, Place]:
    """Returns the segments of the call at (step, position), and the place after it."""
    step, position = place
    updates = config.train.updates_of_call(config.checkpoint.every_steps, step)
    S = updates * config.train.segments_per_update
    segments, position = read_batch(position, S)
    return segments, (step + updates, position)


def open_log(
    config: Config, folder: Path, step: int, events: Events, send_line: SendLine
) -> MetricsLog:
    """Opens metrics.jsonl, whose lines are also sent to TensorBoard and `send_line`."""
    train = config.train
    width = train.ext_len + train.tgt_len
    flops = needed_flops(config.model, train.batch_size, width, True)

    def show(line: Json) -> None:
        numbers = scalars(line)
        events.scalars(line["step"], numbers)
        send_line(line["step"], numbers)

    return MetricsLog(
        folder / METRICS,
        last_step=step,
        num_steps=train.num_steps,
        every=train.log_every,
        show=show,
        ideal_seconds=train.segments_per_update * flops / peak_flops(),
    )
