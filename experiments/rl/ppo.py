"""PPO for agents with a memory: rollout and update in one compiled step.

    python -m experiments.rl.ppo [--environment=t_maze --length=10] [--core=gru]
    python -m experiments.rl.ppo --gymnax=MemoryChain-bsuite

Prints the mean return while it trains and one JSON line at the end, and writes
return.png. The same command resumes exactly after a kill.

Dims: B streams, T steps of a window, L steps of a call, X numbers observed, A actions.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.errors import Interrupted, UserError
from txl_jax.fields import at_least, check, fraction, one_of, positive
from txl_jax.model.config import RESIDUALS, ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.report import plots, provenance
from txl_jax.report.checksum import Json
from txl_jax.report.log import MetricsLog, read_metrics, to_json
from txl_jax.report.progress import Progress, compile_step
from txl_jax.runtime import allocator, distributed, preemption
from txl_jax.runtime.storage import write_atomically
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import check_streams, letters, shardings
from txl_jax.update.state import Metrics, Program, TrainState
from txl_jax.update.step import split_streams, stream_dimension
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.lock import locked

from .agent import Agent, AgentMemory, gru_agent, read, start_acting, transformer_agent
from .environments import ENVIRONMENTS, Environment

# Flags that a resumed run may change.
MAY_CHANGE = ("updates", "save_every", "solved")
SMOOTHED = 10  # updates whose episodes give the return that is reported


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of a run."""

    environment: str = one_of(ENVIRONMENTS, "t_maze")
    length: int = at_least(1, 10)  # steps until the junction or the end
    gymnax: str = ""  # an environment of gymnax instead
    core: str = one_of(("transformer_xl", "gru"), "transformer_xl")
    gate: str = one_of(RESIDUALS, "none")  # as model.gate
    n_layer: int = at_least(1, 2)  # the GRU has one layer of as many parameters
    d_model: int = at_least(2, 32)
    n_head: int = at_least(1, 2)
    mem_len: int = at_least(0, 64)
    streams: int = at_least(1, 64)  # environments
    steps: int = at_least(1, 64)  # of an environment between two updates
    segment_len: int = at_least(1, 32)  # of the steps read in one call
    gradient_segments: int = at_least(1, 1)  # that a gradient crosses
    updates: int = at_least(1, 100)
    epochs: int = at_least(1, 4)  # of an update
    minibatches: int = at_least(1, 4)  # of an epoch; each has some of the streams
    lr: float = positive(1e-3)
    discount: float = fraction(0.99)
    trace_decay: float = fraction(0.95)  # lambda of the advantages
    clip: float = positive(0.2)  # of the probability ratio
    entropy: float = at_least(0.0, 0.01)  # weight of its bonus
    seed: int = at_least(0, 1)
    solved: float = 0.9  # the return from which the task counts as solved
    save_every: int = at_least(1, 50)  # updates

    def __post_init__(self) -> None:
        """Raises UserError for values that do not fit together."""
        check(self, "ppo")
        if self.steps % self.call_len:
            raise UserError(
                f"steps = {self.steps} is not divisible by segment_len x "
                f"gradient_segments = {self.call_len}: change one of them"
            )
        if self.streams % self.minibatches:
            raise UserError(
                f"streams = {self.streams} is not divisible by minibatches = "
                f"{self.minibatches}: change one of them"
            )

    @property
    def call_len(self) -> int:
        """L, the number of steps that a gradient crosses."""
        return self.segment_len * self.gradient_segments


class Streams(NamedTuple):
    """What each stream keeps between two steps."""

    memory: AgentMemory
    env: Any  # the environment's state
    seen_BX: Array
    first_B: Array  # an episode starts
    gained_B: Array  # the rewards of the episode so far


class Window(NamedTuple):
    """The steps of every stream between two updates."""

    seen_BTX: Array
    first_BT: Array
    action_BT: Array
    log_p_BT: Array  # of the action
    value_BT: Array  # the expected return
    reward_BT: Array
    over_BT: Array  # the episode ends with the step
    return_BT: Array  # of the episode until now


def make_environment(options: Options) -> Environment:
    """Returns the environment that the flags name."""
    if not options.gymnax:
        return ENVIRONMENTS[options.environment](options.length)
    from .gymnax_adapter import adapt  # gymnax is an extra

    return adapt(options.gymnax)


def make_agent(options: Options, env: Environment) -> Agent:
    """Returns the agent that the flags describe."""
    config = ModelConfig(
        n_layer=options.n_layer,
        d_model=options.d_model,
        n_head=options.n_head,
        d_head=options.d_model // options.n_head,
        d_inner=2 * options.d_model,
        mem_len=options.mem_len,
        same_length=True,
        same_length_self=True,
        pre_lnorm=True,
        gate=options.gate,
        dropout=0.0,
        init_std=options.d_model**-0.5,
    )
    agent = transformer_agent(config, env.actions)
    return gru_agent(agent, env.observed) if options.core == "gru" else agent


def begin(agent: Agent, env: Environment, B: int, key: Array) -> Streams:
    """Returns new episodes in all streams."""
    state, seen_BX = jax.vmap(env.begin)(jax.random.split(key, B))
    return Streams(
        agent.empty(B), state, seen_BX, jnp.ones(B, bool), jnp.zeros(B, jnp.float32)
    )


def play(
    agent: Agent, env: Environment, params: Params, streams: Streams, key: Array, T: int
) -> tuple[Window, Array, Streams]:
    """Takes T steps in every stream.

    Returns the window, the expected return after it and the streams, whose memory is
    the one before the window.
    """
    B = len(streams.first_B)
    params, memory = start_acting(agent, params, streams.memory)

    def act(streams: Streams) -> Any:
        args = streams.seen_BX[:, None], streams.first_B[:, None], streams.memory
        logits_BLA, value_BL, memory = agent.apply({"params": params}, *args)
        return logits_BLA[:, 0], value_BL[:, 0], memory

    def step(streams: Streams, key: Array) -> Any:
        keys = jax.random.split(key, 3)
        logits_BA, value_B, memory = act(streams)
        action_B = jax.random.categorical(keys[0], logits_BA)
        env_keys, begin_keys = (jax.random.split(key, B) for key in keys[1:])
        moved = jax.vmap(env.step)(env_keys, streams.env, action_B)
        state, seen_BX, reward_B, over_B = moved
        return_B = streams.gained_B + reward_B

        def restart(new: Array, old: Array) -> Array:
            return jnp.where(over_B.reshape(B, *[1] * (old.ndim - 1)), new, old)

        fresh = jax.vmap(env.begin)(begin_keys)
        state, seen_BX = jax.tree.map(restart, fresh, (state, seen_BX))
        log_p_B = log_probability(logits_BA, action_B)
        happened = streams.seen_BX, streams.first_B, action_B, log_p_B, value_B
        after = Streams(memory, state, seen_BX, over_B, jnp.where(over_B, 0, return_B))
        return after, Window(*happened, reward_B, over_B, return_B)

    keys_T = jax.random.split(key, T)
    after, window = jax.lax.scan(step, streams._replace(memory=memory), keys_T)
    _, value_B, _ = act(after)
    window = jax.tree.map(lambda x_TB: jnp.swapaxes(x_TB, 0, 1), window)
    return window, value_B, after._replace(memory=streams.memory)


def log_probability(logits_xA: Array, action_x: Array) -> Array:
    """Returns the log-probability of the actions; x are any dimensions."""
    log_p_xA = jax.nn.log_softmax(logits_xA)
    return jnp.take_along_axis(log_p_xA, action_x[..., None], axis=-1)[..., 0]


def advantages(window: Window, value_B: Array, options: Options) -> Array:
    """Returns the generalized advantages (Schulman et al. 2016), [B, T].

    value_B: the expected return after the window.
    """

    def back(carry: tuple[Array, Array], step: Any) -> Any:
        gain_B, next_value_B = carry
        reward_B, value_B, over_B = step
        going_B = options.discount * ~over_B
        error_B = reward_B + going_B * next_value_B - value_B
        gain_B = error_B + going_B * options.trace_decay * gain_B
        return (gain_B, value_B), gain_B

    steps = window.reward_BT.T, window.value_BT.T, window.over_BT.T
    start = jnp.zeros_like(value_B), value_B
    return jax.lax.scan(back, start, steps, reverse=True)[1].T


def loss(
    params: Params,
    agent: Agent,
    options: Options,
    memory: AgentMemory,
    window: Window,
    gain_BT: Array,
) -> tuple[Array, Array]:
    """Returns (PPO's loss (Schulman et al. 2017), entropy), means over the steps.

    memory: the one before the window. gain_BT: advantages, normalized for the actor.
    """
    logits_BTA, value_BT, _ = read(
        agent, params, memory, window.seen_BTX, window.first_BT, options.call_len
    )
    log_p_BT = log_probability(logits_BTA, window.action_BT)
    ratio_BT = jnp.exp(log_p_BT - window.log_p_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - options.clip, 1 + options.clip)
    scaled_BT = (gain_BT - gain_BT.mean()) / (gain_BT.std() + 1e-8)
    actor = -jnp.minimum(ratio_BT * scaled_BT, clipped_BT * scaled_BT).mean()
    critic = jnp.square(value_BT - window.value_BT - gain_BT).mean() / 2
    log_p_BTA = jax.nn.log_softmax(logits_BTA)
    entropy = -(jnp.exp(log_p_BTA) * log_p_BTA).sum(axis=-1).mean()
    return actor + critic - options.entropy * entropy, entropy


def make_update(
    agent: Agent,
    env: Environment,
    optimizer: optax.GradientTransformation,
    options: Options,
) -> Any:
    """Returns update(state) -> (state, metrics): a rollout, then PPO's epochs."""

    def learn(params: Params, opt_state: Any, chunks: Any) -> Any:
        def epoch(carry: Any, _: None) -> Any:
            return jax.lax.scan(minibatch, carry, chunks)

        def minibatch(carry: Any, chunk: Any) -> Any:
            params, opt_state = carry
            grad = jax.value_and_grad(loss, has_aux=True)
            numbers, grads = grad(params, agent, options, *chunk)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), numbers

        return jax.lax.scan(epoch, (params, opt_state), length=options.epochs)

    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        params, before = state.params, cast(Streams, state.memory)
        key = jax.random.fold_in(state.rng, state.step)
        window, value_B, after = play(agent, env, params, before, key, options.steps)
        gain_BT = advantages(window, value_B, options)
        seen = before.memory, window.seen_BTX, window.first_BT
        *_, memory = read(agent, params, *seen, options.steps)

        split = functools.partial(split_streams, C=options.minibatches)
        chunks = before.memory, window, gain_BT
        axes = stream_dimension(before.memory), jax.tree.map(lambda _: 0, chunks[1:])
        chunks = jax.tree.map(split, chunks, (axes[0], *axes[1]))
        (params, opt_state), numbers = learn(params, state.opt_state, chunks)
        losses, entropies = numbers
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=cast(Any, after._replace(memory=memory)),
        )
        return state, {
            "loss": losses.mean(),
            "entropy": entropies.mean(),
            "tokens": jnp.asarray(window.over_BT.size),
            "episodes": window.over_BT.sum(),
            "returns": jnp.sum(window.return_BT * window.over_BT),
        }

    return update


def make_program(options: Options, mesh: Mesh) -> Program:
    """Returns the jitted functions of a run; streams are split over the mesh."""
    check_streams(mesh, options.streams // options.minibatches, "streams / minibatches")
    env = make_environment(options)
    agent = make_agent(options, env)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(options.lr, eps=1e-5)
    )

    def create() -> TrainState:
        keys = jax.random.split(jax.random.key(options.seed), 3)
        params = agent.init_params(keys[0], env.observed)
        streams = begin(agent, env, options.streams, keys[1])
        step = jnp.zeros((), jnp.int32)
        memory: Any = streams
        return TrainState(step, params, optimizer.init(params), memory, keys[2])

    state = jax.eval_shape(create)
    specs = jax.tree.map(lambda _: PartitionSpec(), state)
    fresh = cast(Streams, state.memory)
    env_specs = jax.tree.map(lambda _: PartitionSpec("B"), fresh.env)
    streams = letters(fresh._replace(env=None))._replace(env=env_specs)
    places = shardings(mesh, dataclasses.replace(specs, memory=streams))
    update = make_update(agent, env, optimizer, options)
    step = jax.jit(update, donate_argnums=0, out_shardings=(places, None))
    return Program(jax.jit(create, out_shardings=places), places, step)


def claim(workdir: Path, options: Options) -> None:
    """Writes the flags beside the checkpoints; raises UserError if they changed."""
    path, fields = workdir / "options.json", dataclasses.asdict(options)
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        changed = [x for x in fields if x not in MAY_CHANGE and fields[x] != before[x]]
        if changed:
            raise UserError(
                f"{workdir} holds a run with other values of {', '.join(changed)}: "
                "give them, or another --workdir"
            )
    write_atomically(path, lambda fresh: fresh.write_text(json.dumps(fields), "utf-8"))


def train(options: Options, workdir: Path) -> Json:
    """Makes all updates, from the newest checkpoint if there is one; returns results.

    Raises UserError for impossible flags, Interrupted after a signal.
    """
    program = make_program(options, make_mesh(MeshConfig()))
    with ExitStack() as stack:
        enter, stop = stack.enter_context, preemption.current()
        enter(locked(workdir))
        claim(workdir, options)
        checkpoints = enter(open_checkpoints(workdir))
        start = save_restore.restore_or_init(checkpoints, workdir, program, None)
        step, state, position = start
        log = enter(MetricsLog(workdir / METRICS, step, options.updates, every=1))
        bar = enter(Progress("ppo", options.updates, step))
        stack.callback(stop.release)
        with log.timing.spend("compile"):
            update = compile_step("the update", program.step, state)
        while step < options.updates:
            (state, metrics), step = update(state), step + 1
            stop.hold()
            numbers = {name: x.item() for name, x in jax.device_get(metrics).items()}
            log.append([numbers])
            bar(step, **{"return": f"{mean_return([numbers]):.3f}"})
            checkpoints.poll()
            ends = stop.at_boundary()
            if ends or step % options.save_every == 0 or step == options.updates:
                with checkpoints.attempt(step):
                    log.sync(None)
                    save_restore.save(checkpoints, step, state, position, None)
            if ends:
                checkpoints.finish(step)
                raise stop.end(f"at update {step}, which is saved")
        checkpoints.finish(step)
    return summarize(options, workdir)


def mean_return(updates: list[Json]) -> float:
    """Returns the mean return of the episodes that ended in some updates, or NaN."""
    episodes = sum(each["episodes"] for each in updates)
    return sum(each["returns"] for each in updates) / episodes if episodes else math.nan


def summarize(options: Options, workdir: Path) -> Json:
    """Returns a run's results and draws its returns."""
    lines = read_metrics(workdir / METRICS)
    updates = [line["exact"] for line in lines]
    means = [
        mean_return(updates[max(u - SMOOTHED, 0) : u])
        for u in range(1, len(updates) + 1)
    ]
    steps = np.cumsum([each["tokens"] for each in updates])
    figure = plots.empty(7, 4)
    axes = figure.add_subplot()
    axes.plot(steps, means)
    axes.set(xlabel="steps of all environments", ylabel="return of an episode")
    plots.save(figure, workdir / "return.png")
    env = make_environment(options)
    solved = (u for u, mean in enumerate(means, 1) if mean >= options.solved)
    return {
        "program": "ppo",
        "options": dataclasses.asdict(options),
        "parameters": make_agent(options, env).count(env.observed),
        "updates": len(updates),
        "steps": int(steps[-1]),
        "return": means[-1],
        "solved_after": next(solved, None),
        "seconds": lines[-1]["timing"]["total_seconds"],
        "picture": str(workdir / "return.png"),
        "provenance": provenance.describe_result(),
    }


def read_flags() -> tuple[Options, Path]:
    """Returns the flags: a field of Options each, and the workdir."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/rl"))
    for each in dataclasses.fields(Options):
        parser.add_argument(f"--{each.name}", type=each.type, default=each.default)
    flags = vars(parser.parse_args())
    workdir = flags.pop("workdir")
    return Options(**flags), workdir


def main() -> int:
    """Trains, and prints one JSON line; returns the exit status."""
    allocator.keep_freed()
    logging.set_verbosity(logging.FATAL)  # orbax warns of intended settings
    try:
        options, workdir = read_flags()
        with preemption.listening(), contextlib.redirect_stdout(sys.stderr):
            result = train(options, workdir)
    except (UserError, Interrupted) as error:
        return distributed.report(error)
    print(to_json(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
