"""PPO for agents with a memory: rollout and update in one compiled step.

    python -m txl_jax.experiments.rl.ppo [--environment=t_maze --length=10] [--core=gru]
    python -m txl_jax.experiments.rl.ppo --gymnax=MemoryChain-bsuite

Prints the mean return while it trains and one JSON line at the end, and writes
return.png. The same command resumes exactly after a kill. Checkpoints hold the best
policy, which `load` returns.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from txl_jax.checkpoint import save_restore
from txl_jax.errors import BadNumbers, UserError, refuse
from txl_jax.model.modules import Params
from txl_jax.report import plots, provenance
from txl_jax.report.metrics_log import MetricsLog, read_metrics, spent_seconds
from txl_jax.report.progress import Progress
from txl_jax.runtime import preemption
from txl_jax.runtime.programs import compile_program
from txl_jax.runtime.storage import Json, local_path, refusing_damage, write_atomically
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import abstract, check_streams, letters, shardings
from txl_jax.update.state import Average, TrainState, Updater, jit_step
from txl_jax.workdir.folder import CHECKPOINTS, CONFIG, METRICS
from txl_jax.workdir.lock import locked
from txl_jax.workdir.run_record import last_step

from ..figures import program
from .agent import Agent, make_agent
from .environments import ENVIRONMENTS, Environment
from .learning import SMOOTHED, Record, begin, evaluate, make_update
from .options import Options

OPTIONS = "options.json"  # the flags of a run, in its workdir
PICTURE = "return.png"  # drawn after the last update
# Flags that a resumed run may change.
MAY_CHANGE = ("save_every", "solved", "stop")


def make_environment(options: Options) -> Environment:
    """Returns the environment that the flags name."""
    if not options.gymnax:
        return ENVIRONMENTS[options.environment](options.length)
    from .gymnax_adapter import adapt  # gymnax is an extra

    return adapt(options.gymnax)


def make_player(options: Options) -> tuple[Agent, Environment]:
    """Returns the agent and the environment that the flags describe."""
    env = make_environment(options)
    return make_agent(options, env.observed, env.actions), env


def load(workdir: Path | str) -> tuple[Agent, Environment, Params]:
    """Returns a run's agent and environment, and the parameters of its best policy."""
    workdir = local_path(str(workdir), "workdir")
    path = workdir / OPTIONS
    refuse(not path.exists(), f"{workdir} holds no run of this program")
    options = read_options(path)
    agent, env = make_player(options)
    like = jax.eval_shape(lambda: agent.init_params(jax.random.key(0)))
    return agent, env, save_restore.restore_params(workdir, "latest", like)[0]


def read_options(path: Path) -> Options:
    """Returns the flags of a run; raises UserError if the file is damaged."""
    with refusing_damage(path, "give another --workdir"):
        return Options(**json.loads(path.read_text("utf-8")))


def make_updater(options: Options, mesh: Mesh) -> Updater:
    """Returns how to begin and to update a run; streams are split over the mesh."""
    check_streams(mesh, options.streams // options.minibatches, "streams / minibatches")
    agent, env = make_player(options)
    steps = options.updates * options.epochs * options.minibatches
    lr = optax.linear_schedule(options.lr, 0.0, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr, eps=1e-5))

    def create() -> TrainState:
        keys = jax.random.split(jax.random.key(options.seed), 3)
        params = agent.init_params(keys[0])
        memory: Any = begin(agent, env, options.streams, keys[1])
        step, zero = jnp.zeros((), jnp.int32), jnp.zeros(())
        opt_state = optimizer.init(params), Record(zero, zero, zero - jnp.inf)
        best = Average(params, step)
        return TrainState(step, params, opt_state, memory, keys[2], best)

    # Every array of the streams is split, and the rest replicated.
    state = jax.eval_shape(create)
    fresh: Any = state.memory
    env_specs = jax.tree.map(lambda _: PartitionSpec("B"), fresh.env)
    streams = letters(fresh._replace(env=None))._replace(env=env_specs)
    specs = jax.tree.map(lambda _: PartitionSpec(), state)
    places = shardings(mesh, dataclasses.replace(specs, memory=streams))
    like = abstract(state, places)
    step = make_update(agent, env, optimizer, options)  # makes its own segments
    return Updater(jax.jit(create, out_shardings=places), like, jit_step(step, like))


def claim(workdir: Path, options: Options) -> None:
    """Writes the flags beside the checkpoints.

    Raises UserError if they changed or the checkpoints have gone.
    """
    last_step(workdir, PICTURE)
    path, fields = workdir / OPTIONS, dataclasses.asdict(options)
    before = dataclasses.asdict(read_options(path)) if path.exists() else fields
    changed = [x for x in fields if x not in MAY_CHANGE and fields[x] != before[x]]
    if changed:
        raise UserError(
            f"{workdir} holds a run with other values of {', '.join(changed)}: "
            "give them, or another --workdir"
        )
    write_atomically(path, json.dumps(fields))


def train(options: Options, workdir: Path) -> Json:
    """Makes all updates, from the newest checkpoint if there is one; returns results.

    Raises UserError for impossible flags, Interrupted after a signal, and BadNumbers
    before an update that is not finite is saved.
    """
    resumed = (workdir / OPTIONS).exists()
    if not resumed and any((workdir / name).exists() for name in (CHECKPOINTS, CONFIG)):
        raise UserError(
            f"{workdir} holds another program's run: give another --workdir"
        )
    updater = make_updater(options, make_mesh(MeshConfig()))
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(locked(workdir))
        claim(workdir, options)
        checkpoints = enter(save_restore.Checkpoints(workdir))
        step, state, position = save_restore.restore_or_init(
            checkpoints, workdir, updater, None
        )
        log = enter(MetricsLog(workdir / METRICS, step, options.updates, every=1))
        bar = enter(Progress("ppo", options.updates, step, unit=""))
        stop = enter(preemption.listening())
        updates = [line["exact"] for line in read_metrics(workdir / METRICS)]
        over = is_over(options, step, updates)
        with log.timing.spend("compile"):
            update = compile_program("the update", updater.step, state)
        while not over:
            (state, metrics), step = update(state), step + 1
            numbers = {name: x.item() for name, x in jax.device_get(metrics).items()}
            if not math.isfinite(numbers["loss"]):
                raise BadNumbers(
                    f"the loss or the parameters of update {step} are not finite: give "
                    "a lower --lr and another --workdir; older checkpoints stay"
                )
            log.append([numbers])
            updates.append(numbers)
            over = is_over(options, step, updates)
            bar(step, 0, f"return {mean_return([numbers]):.3f}")
            checkpoints.poll()
            ends = stop.at_boundary()
            if ends or over or step % options.save_every == 0:
                with log.timing.spend("checkpoint"):
                    checkpoints.save(step, state, position, None, log.sync)
            if ends:
                checkpoints.finish(step)
                raise stop.end(f"at update {step}, which is saved")
        checkpoints.finish(step)
    agent, env = make_player(options)
    key = jax.random.fold_in(state.rng, options.updates)  # no update's
    play = jax.jit(functools.partial(evaluate, agent, env, options))
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "best_return": play(state.evaluated, key).item(),
        "best_update": state.average.count.item(),
        **summarize(options, workdir, step),
    }


def is_over(options: Options, step: int, updates: list[Json]) -> bool:
    """Returns whether a run ends, after the updates with these metrics."""
    solved = mean_return(updates[-SMOOTHED:]) >= options.solved
    return step >= options.updates or (options.stop and solved)


def mean_return(updates: list[Json]) -> float:
    """Returns the mean return of the episodes that ended in some updates, or NaN."""
    episodes = sum(each["episodes"] for each in updates)
    return sum(each["returns"] for each in updates) / episodes if episodes else math.nan


def summarize(options: Options, workdir: Path, updates: int) -> Json:
    """Returns a run's results from its log, and draws its returns.

    A damaged log lacks lines: `updates` is the number of updates.
    """
    lines = read_metrics(workdir / METRICS)
    made = [line["step"] for line in lines]
    exact, steps = [line["exact"] for line in lines], options.streams * options.steps
    recent = (exact[max(u - SMOOTHED, 0) : u] for u in range(1, len(exact) + 1))
    means = [*map(mean_return, recent)]
    figure = plots.empty(7, 4)
    axes = figure.add_subplot()
    axes.plot([steps * update for update in made], means)
    axes.set(xlabel="steps of all environments", ylabel="return of an episode")
    plots.save(figure, workdir / PICTURE)
    return {
        "program": "ppo",
        "options": dataclasses.asdict(options),
        "updates": updates,
        "steps": steps * updates,
        "return": means[-1] if means else None,
        "max_return": max((x for x in means if not math.isnan(x)), default=None),
        "solved_after": next(
            (u for u, x in zip(made, means, strict=True) if x >= options.solved), None
        ),
        "seconds": spent_seconds(workdir / METRICS),
        "picture": str(workdir / PICTURE),
        "provenance": provenance.describe_result(),
    }


def main(argv: list[str] | None = None) -> int:
    """Trains, and prints one JSON line; returns the exit status."""
    parser = program.make_parser(__doc__)
    parser.add_argument("--workdir", type=program.path, default=Path("runs/rl"))
    for each in Options.fields():
        is_bool = each.type is bool
        value: Any = {"action": "store_true"} if is_bool else {"type": each.type}
        text = f"{each.help} Default: %(default)s"
        parser.add_argument(f"--{each.key}", default=each.default, help=text, **value)

    def measure(args: argparse.Namespace) -> Json:
        flags = vars(args)
        workdir = flags.pop("workdir")
        return train(Options(**flags), workdir)

    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
