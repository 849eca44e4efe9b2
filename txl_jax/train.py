"""The training loop: restore, update, log, validate, save."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import Checkpoints, open_checkpoints
from txl_jax.checkpoint.save_restore import Snapshot
from txl_jax.config import Config
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import Position
from txl_jax.errors import Interrupted
from txl_jax.metrics import bits
from txl_jax.model.flops import needed_flops
from txl_jax.model.segment import Segment
from txl_jax.report.log import MetricsLog, say
from txl_jax.report.peak import peak_flops
from txl_jax.report.progress import Progress, waiting
from txl_jax.report.tensorboard import Events, scalars
from txl_jax.report.trace import Trace
from txl_jax.runtime import distributed
from txl_jax.runtime.preemption import stop
from txl_jax.runtime.watchdog import Watchdog
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.rules import place_segments
from txl_jax.update.guard import explain
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import Program, TrainStep
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.lock import Fence, unfenced
from txl_jax.workdir.staging import Staging

Metrics = dict[str, Any]
Callbacks = Sequence[Callable[..., Any]]
# (position, S) -> (the S segments read there, the position after them).
ReadBatch = Callable[[Position, int], tuple[Segment, Position]]
# Where a call starts: the number of updates before it, and its position in the data.
Place = tuple[int, Position]
# (params, progress) -> mean nll in nats; calls progress(done, total) between segments.
Validate = Callable[[Any, Callable[[int, int], None]], float]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks around a call of the training step, in order."""

    before: Callbacks = ()  # (step, state), before the call is dispatched
    # (the step before a call, the metrics of its updates, its segments), one call late
    fetched: Callbacks = ()
    logged: Callbacks = ()  # (step, numbers by tag) of a line of metrics.jsonl
    # (), between calls and during a validation; a true result saves the run now
    boundary: Callbacks = ()
    saved: Callbacks = ()  # (state), after a save has started; may raise to end the run


NO_HOOKS = Hooks()


def run_all(callbacks: Callbacks, *args: Any) -> bool:
    """Calls all callbacks; returns whether any of them returned true."""
    return any([callback(*args) for callback in callbacks])


def train(
    config: Config,
    workdir: Path,
    program: Program,
    read_batch: ReadBatch,
    mean_nll: Validate,
    params: Any = None,
    observers: Hooks = NO_HOOKS,
    fence: Fence = unfenced,
) -> dict[str, Any]:
    """Trains to config.train.num_steps, from the newest checkpoint if there is one.

    A fresh run starts from `params`, or from random parameters if None. Returns the
    number of updates and the steps whose save failed. Raises UserError if the last save
    failed or another run has taken the workdir over, and Interrupted after a signal; a
    resumed run repeats an interrupted validation. Exceptions of the observers
    propagate.
    """
    mesh = make_mesh(config.mesh)
    with ExitStack() as stack:
        stack.callback(stop.release)
        watchdog = stack.enter_context(Watchdog(config.run.hang_seconds))
        opened = open_checkpoints(workdir, config.checkpoint)
        manager = stack.enter_context(closing(opened))
        step, state, position = start = begin(workdir, manager, program, params)
        polls = watchdog.feed, manager.poll
        staging = stack.enter_context(Staging(workdir, METRICS, fence=fence))
        log, hooks = make_hooks(config, staging.folder, step, stack, polls, observers)
        read_call = partial(read_segments, config, read_batch)
        ahead = stack.enter_context(closing(prefetch(read_call, (step, position))))
        stack.enter_context(jax.transfer_guard("disallow"))
        # Innermost: after the loss of a process, leaving the contexts above would hang.
        stack.push(distributed.exit_on_error)
        batches = (
            (place_segments(mesh, segments), place)
            for segments, place in log.timing.inputs(ahead)
        )
        every = config.checkpoint.every_steps
        train_step = log.timing.compiling(program.step, program.compile)
        saves = advance(train_step, start, batches, config.train, every, hooks)
        # A restored step whose validation is missing is validated first.
        if step and config.train.validates(step) and not manager.validated(step):
            saves = itertools.chain([start], saves)
        for step, state, position in saves:
            valid_nll, validates = None, config.train.validates(step)
            if validates and not stop.reached:
                with log.timing.spend("evaluation"):
                    valid_nll = validate(mean_nll, state.evaluated, hooks)
            # orbax copies arrays to the host implicitly.
            with log.timing.spend("checkpoint"), jax.transfer_guard("allow"):
                with manager.attempt(step):
                    with distributed.together(*manager.errors):
                        log.sync(valid_nll, owed=validates and valid_nll is None)
                        staging.upload()
                    save_restore.save(manager, step, state, position, valid_nll)
                if step not in manager.failed:
                    run_all(hooks.saved, state)
            if stop.reached:
                manager.finish(step)
                raise stop.end(f"at update {step}, which is saved")
        manager.finish(step)
        return {"updates": step, "failed_saves": manager.failed}


def begin(
    workdir: Path, manager: Checkpoints, program: Program, params: Any
) -> Snapshot:
    """Returns (step, state, position) of the newest checkpoint, or of a fresh run."""
    like = save_restore.abstract(jax.eval_shape(program.init), program.shardings)
    if resumed := save_restore.restore(manager, like):
        say(f"resumed at update {resumed.step} from {manager.directory}")
        return resumed
    say(f"fresh run in {workdir}")
    with waiting("compiling and computing the initial parameters"):
        state = program.init()
    return Snapshot(
        0, state if params is None else state.start_from(params), Position()
    )


def read_segments(
    config: Config, read_batch: ReadBatch, place: Place
) -> tuple[Segment, Place]:
    """Returns the segments of the call at a place, and the place after it."""
    step, position = place
    updates = config.train.updates_of_call(config.checkpoint.every_steps, step)
    S = updates * config.train.segments_per_update
    segments, position = read_batch(position, S)
    return segments, (step + updates, position)


def make_hooks(
    config: Config,
    workdir: Path,
    step: int,
    stack: ExitStack,
    polls: Callbacks,
    observers: Hooks,
) -> tuple[MetricsLog, Hooks]:
    """Returns the metrics log and the callbacks of everything that observes updates."""
    train = config.train
    events = stack.enter_context(Events(workdir, step))
    path, counts = workdir / METRICS, (step, train.num_steps, train.log_every)
    width = train.ext_len + train.tgt_len
    flops = needed_flops(config.model, train.batch_size, width, True)
    ideal = train.segments_per_update * flops / peak_flops()

    def show(line: Metrics) -> None:
        logged = events.scalars, *observers.logged
        run_all(logged, line["step"], scalars(line))

    log = stack.enter_context(MetricsLog(path, *counts, show, ideal))
    bar = stack.enter_context(Progress("train", train.num_steps, step))
    profile = config.run.profiled(), workdir / "profile", config.run.profiler_port
    trace = stack.enter_context(Trace(*profile))

    def fetched(step: int, updates: list[Metrics], segments: Segment) -> None:
        log.append(updates)
        loss, rate = updates[-1]["loss"], f"{log.tokens_per_second:,.0f}"
        made, bpc, mfu = step + len(updates), f"{bits(loss):.4f}", f"{log.mfu:.1%}"
        bar(made, loss=f"{loss:.4f}", bpc=bpc, tokens_per_s=rate, mfu=mfu)

    return log, Hooks(
        before=[trace.before, *observers.before],
        fetched=[fetched, *observers.fetched],
        boundary=[*polls, stop.at_boundary, *observers.boundary],
        saved=observers.saved,
    )


def advance(
    train_step: TrainStep,
    start: Snapshot,
    batches: Iterator[tuple[Segment, Place]],
    config: TrainConfig,
    save_every: int,
    hooks: Hooks,
) -> Iterator[Snapshot]:
    """Makes updates; yields (step, state, position) whenever the state is to be saved.

    All metrics up to that step have then been fetched. Otherwise those of a call are
    fetched after the next call was dispatched, so the devices never wait for the host.
    """
    step, state, position = start
    pending: tuple[int, Metrics, Segment] | None = None
    while step < config.num_steps:
        segments, (end, position) = next(batches)
        run_all(hooks.before, step, state)
        state, metrics = train_step(state, segments)
        stop.hold()
        if pending is not None:
            fetch(hooks, *pending)
        pending = step, metrics, segments
        step = end
        ends = run_all(hooks.boundary)
        if ends or config.validates(step) or step % save_every == 0:
            fetch(hooks, *pending)
            pending = None
            yield Snapshot(step, state, position)


def fetch(hooks: Hooks, step: int, metrics: Metrics, segments: Segment) -> None:
    """Waits for the metrics of a call, and passes those of each update to the hooks.

    The loop's only transfer of metrics to the host.
    """
    host = jax.device_get(metrics)
    updates = [
        explain({name: values[u].item() for name, values in host.items()})
        for u in range(len(host["loss"]))
    ]
    run_all(hooks.fetched, step, updates, segments)


def validate(mean_nll: Validate, params: Any, hooks: Hooks) -> float | None:
    """Returns the mean nll in nats; None if the run ends before it is complete."""
    with Progress("valid") as bar:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if run_all(hooks.boundary):
                raise stop.end("while validating")

        try:
            nll = mean_nll(params, progress)
        except Interrupted:
            return None
    return nll
