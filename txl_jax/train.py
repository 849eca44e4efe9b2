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
from txl_jax.errors import Interrupted
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate
from txl_jax.model.txl import TransformerXL
from txl_jax.optim import make_average, make_optimizer, make_schedule
from txl_jax.preemption import stop
from txl_jax.report.trace import Trace
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
        {name: values[u].item() for name, values in host.items()}
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
        seed=how.seed,
        order=ORDERS[how.order](tokens, how.sentence_end, how.seed),
    )


def make_step(config: Config, mesh: Mesh) -> tuple[Any, TrainState, Any]:
    """Returns (init, like, train_step): a state to begin with, its shapes, an update.

    like says where on the mesh each array lives; train_step takes a state's memory.
    """
    how = config.train
    optimizer = make_optimizer(config.optim)
    average = make_average(config.optim)
    init, places = init_state(
        config.model, optimizer, how.batch_size, how.seed, mesh, average is not None
    )
    schedule = make_schedule(config.optim, how.num_steps)
    train_step = jax.jit(
        make_train_step(TransformerXL(config.model), optimizer, schedule, how, average),
        donate_argnums=0,
        out_shardings=(places, None),
    )
    return init, checkpoint.abstract(jax.eval_shape(init), places), train_step


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


def train(
    config: Config,
    workdir: Path,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    params: Any = None,
) -> None:
    """Trains to config.train.num_steps, going on from the newest checkpoint.

    config.model.vocab_size is set. params: what a fresh run begins with, those that
    `restore.load_initial` finds in train.init_from; None = random ones. Leaves
    checkpoints and metrics.jsonl in workdir. Raises Interrupted when a signal ended it,
    its state saved; a validation that was due then is made when it goes on.
    """
    how = config.train
    mesh = make_mesh(config.mesh)
    streams = make_streams(
        how, train_tokens, host_rows(mesh, how.batch_size, "train.batch_size")
    )
    init, like, train_step = make_step(config, mesh)
    evaluate = make_evaluate(config.model, config.eval, mesh)

    with ExitStack() as stack:
        stack.callback(stop.release)
        watchdog = stack.enter_context(Watchdog(config.run.hang_seconds))
        opened = checkpoint.open_checkpoints(workdir, config.checkpoint)
        manager = stack.enter_context(closing(opened))
        restored = checkpoint.restore(manager, like)
        step = manager.latest_step() or 0
        if restored:
            say(f"resumed at update {step} from {manager.directory}")
            state, position = restored
        else:
            say(f"fresh run in {workdir}")
            state, position = init(), Position()
            if params is not None:
                state = state.start_from(params)
        log = stack.enter_context(
            TrainLog(workdir / "metrics.jsonl", step, how.num_steps, how.log_every)
        )
        ahead = stack.enter_context(closing(Prefetch(streams.batch, position)))
        steps = config.run.profiled()
        trace = stack.enter_context(Trace(steps, workdir / "profile"))
        stack.enter_context(jax.transfer_guard("disallow"))
        stack.push(distributed.fail)

        def settle(validates: bool) -> None:
            """Saves the state, validated where that is due."""
            valid_nll = None
            if validates and not stop.reached:
                valid_nll = validate(
                    evaluate, state.evaluated, valid_tokens, watchdog.feed
                )
            log.sync(valid_nll, ends=stop.reached)
            # orbax copies to the host in its own ways.
            with log.saving(), jax.transfer_guard("allow"):
                checkpoint.save(manager, step, state, position, valid_nll)
            if stop.reached:
                raise stop.end(f"at update {step}, which is saved")

        if restored and how.validates(step) and not checkpoint.has_nll(manager, step):
            settle(True)
        pending: Metrics | None = None
        while step < how.num_steps:
            with log.waiting_for_input():
                segments, position = next(ahead)
                placed = place_segments(mesh, segments)
            trace.before(step, state)
            state, device_metrics = dispatch(train_step, state, placed)
            stop.hold()
            if pending is not None:
                log.updates(fetch(pending))
            pending = device_metrics
            step += how.updates_per_call
            watchdog.feed()
            ends, validates = stop.at_boundary(), how.validates(step)
            if ends or validates or step % config.checkpoint.every_steps == 0:
                log.updates(fetch(pending))
                pending = None
                settle(validates)
