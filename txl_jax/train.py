"""The loop: restore, step, log, evaluate, save.

Dims: S segments in a call, U updates in a call, B streams, L segment.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax import checkpoint, distributed
from txl_jax.config import Config
from txl_jax.data.prefetch import Prefetch
from txl_jax.data.sentences import ORDERS
from txl_jax.data.streams import Position, Streams
from txl_jax.diagnose import Watch
from txl_jax.errors import Interrupted
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate
from txl_jax.guard import explain
from txl_jax.model.txl import TransformerXL
from txl_jax.optim import make_average, make_optimizer, make_schedule
from txl_jax.preemption import stop
from txl_jax.report.tensorboard import Events
from txl_jax.report.trace import Trace
from txl_jax.report.wait import telling_compilation, waiting
from txl_jax.report.writer import Progress, TrainLog, say
from txl_jax.sharding import host_rows, make_mesh, place_segments
from txl_jax.state import TrainState, init_state
from txl_jax.step import TrainConfig, make_train_step
from txl_jax.watchdog import Watchdog

Metrics = dict[str, Any]


def dispatch(step: Callable[..., Any], state: TrainState, segments: Any) -> Any:
    """Starts one call on the devices and returns at once: (state, metrics)."""
    return step(state, segments)


def fetch(device_metrics: Metrics) -> list[Metrics]:
    """Waits for the metrics of a call and returns them as numbers, per update.

    The one place where training's device arrays become host numbers.
    """
    host = jax.device_get(device_metrics)
    updates = len(host["loss"])
    return [
        explain({name: values[u].item() for name, values in host.items()})
        for u in range(updates)
    ]


def make_streams(how: TrainConfig, tokens: np.ndarray, rows: slice) -> Streams:
    """Returns the streams `rows` of the training text, as the config wants them."""
    return Streams(
        tokens,
        how.batch_size,
        how.tgt_len,
        how.segments_per_call,
        rows=rows,
        ext_len=how.ext_len,
        reset_memory_at=how.reset_memory_at,
        roll=how.roll,
        varlen=how.varlen,
        half_loss=how.half_loss,
        score_ids_from=how.score_ids_from,
        seed=how.seed,
        order=ORDERS[how.order](tokens, how.sentence_end, how.seed),
    )


def make_step(config: Config, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Returns (init, places, train_step) of a run on the mesh.

    init() makes a fresh state, which lives in `places`, as does that which train_step
    returns in the arrays of the one that it is given.
    """
    how = config.train
    optimizer, average = make_optimizer(config.optim), make_average(config.optim)
    init, places = init_state(
        config.model, optimizer, how.batch_size, how.seed, mesh, average is not None
    )
    schedule = make_schedule(config.optim, how.num_steps)
    train_step = jax.jit(
        make_train_step(TransformerXL(config.model), optimizer, schedule, how, average),
        donate_argnums=0,
        out_shardings=(places, None),
    )
    return init, places, train_step


def validate(
    evaluate: Evaluate, params: Any, tokens: np.ndarray, feed: Callable[[], None]
) -> float | None:
    """Returns the nats per token, or None where the run is to end before they are."""
    with Progress("valid", 0) as bar:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            feed()
            if stop.at_boundary():
                raise stop.end("while validating")

        try:
            return evaluate(params, tokens, progress)["nll"]
        except Interrupted:
            return None


def begin(
    workdir: Path, init: Callable[[], TrainState], params: Any
) -> tuple[int, Any, Position]:
    """Returns (step, state, position) of a fresh run, with `params` where given."""
    say(f"fresh run in {workdir}")
    with waiting("compiling the initial parameters, and making them"):
        state = init()
    return 0, state if params is None else state.start_from(params), Position()


def train(
    config: Config,
    workdir: Path,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    params: Any = None,
) -> dict[str, Any]:
    """Trains to config.train.num_steps, going on from the newest checkpoint.

    config.model.vocab_size is set. params: what a fresh run begins with, those that
    `restore.load_initial` finds in train.init_from; None = random ones. Leaves
    checkpoints and metrics.jsonl in workdir, and returns the updates made and the steps
    that could not be saved; raises UserError when the last is one of them. Interrupted
    tells that a signal ended it, its state saved; a validation then due comes later.
    """
    how = config.train
    mesh = make_mesh(config.mesh)
    rows = host_rows(mesh, how.batch_size, "train.batch_size")
    streams = make_streams(how, train_tokens, rows)
    init, places, train_step = make_step(config, mesh)
    train_step = telling_compilation("the training step", train_step)
    like = checkpoint.abstract(jax.eval_shape(init), places)
    evaluate = make_evaluate(config.model, config.eval, mesh)

    with ExitStack() as stack:
        stack.callback(stop.release)
        watchdog = stack.enter_context(Watchdog(config.run.hang_seconds))
        opened = checkpoint.open_checkpoints(workdir, config.checkpoint)
        manager = stack.enter_context(closing(opened))
        resumed = checkpoint.restore(manager, like)
        if resumed:
            say(f"resumed at update {resumed.step} from {manager.directory}")
        step, state, position = resumed or begin(workdir, init, params)
        events = stack.enter_context(Events(workdir, step, config.run.tensorboard))
        path, counts = workdir / "metrics.jsonl", (step, how.num_steps, how.log_every)
        log = stack.enter_context(TrainLog(path, *counts, events.line))
        ahead = stack.enter_context(closing(Prefetch(streams.batch, position)))
        steps = config.run.profiled()
        trace = stack.enter_context(Trace(steps, workdir / "profile"))
        stack.enter_context(jax.transfer_guard("disallow"))
        stack.push(distributed.fail)
        watch = Watch(config.model, how, step)

        def settle(validates: bool) -> None:
            """Saves the state, validated where that is due."""
            valid_nll = None
            if validates and not stop.reached:
                valid_nll = validate(
                    evaluate, state.evaluated, valid_tokens, watchdog.feed
                )
            # orbax copies to the host in its own ways.
            with log.saving(), jax.transfer_guard("allow"), manager.attempt(step):
                log.sync(valid_nll, ends=stop.reached)
                checkpoint.save(manager, step, state, position, valid_nll)
                watch.stop_if_found(state)
            if stop.reached:
                manager.finish(step)
                raise stop.end(f"at update {step}, which is saved")

        if resumed and how.validates(step) and not manager.validated(step):
            settle(True)
        pending: Metrics | None = None
        while step < how.num_steps:
            with log.waiting_for_input():
                segments, position = next(ahead)
                placed = place_segments(mesh, segments)
            trace.before(step, state)
            watch.dispatched(placed)
            state, device_metrics = dispatch(train_step, state, placed)
            stop.hold()
            if pending is not None:
                log.updates(watch.fetched(fetch(pending)))
            pending = device_metrics
            step += how.updates_per_call
            watchdog.feed()
            manager.poll()
            validates = how.validates(step)
            ends = stop.at_boundary() or watch.found is not None
            if ends or validates or step % config.checkpoint.every_steps == 0:
                log.updates(watch.fetched(fetch(pending)))
                pending = None
                settle(validates)
        manager.finish(step)
        copies = {"failed_copies": manager.copies.failed} if manager.copies else {}
        return {"updates": step, "failed_saves": manager.failed, **copies}
