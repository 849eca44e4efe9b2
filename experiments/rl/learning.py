"""A rollout and PPO's update of an agent with a memory, as pure functions.

An update reads each window from the memory that the rollout began with, so it sees what
the rollout saw (Schulman et al. 2017; the memory is Dai et al. 2019, section 3.2).

Dims: B streams, T steps of a window, L steps of a call, X numbers observed, A actions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from txl_jax.model.modules import Params
from txl_jax.update.state import Average, Metrics, TrainState
from txl_jax.update.step import split_streams, stream_dimension

from .agent import Agent, act, read_window, start_acting
from .environments import Environment
from .options import Options

SMOOTHED = 10  # updates over whose episodes a return is averaged


class Streams(NamedTuple):
    """The state of each stream between two steps."""

    memory: Any  # the agent's
    env: Any  # the environment's state
    seen_BX: Array
    first_B: Array  # an episode starts
    gained_B: Array  # the rewards of the episode so far


class Window(NamedTuple):
    """The steps of every stream between two updates."""

    seen_BTX: Array
    first_BT: Array
    action_BT: Array
    logp_BT: Array  # the action's log-probability
    value_BT: Array  # the expected return
    reward_BT: Array
    over_BT: Array  # the episode ends with the step
    return_BT: Array  # the episode's rewards so far


class Batch(NamedTuple):
    """Inputs of the loss: windows, and the memories before them."""

    memory: Any
    window: Window
    gain_BT: Array  # advantages


class Record(NamedTuple):
    """Sums over the newest episodes, and the highest mean so far."""

    returns: Array
    episodes: Array
    best: Array


def begin(agent: Agent, env: Environment, B: int, key: Array) -> Streams:
    """Returns new episodes in all streams."""
    state, seen_BX = jax.vmap(env.begin)(jax.random.split(key, B))
    return Streams(agent.empty(B), state, seen_BX, jnp.ones(B, bool), jnp.zeros(B))


def play(
    agent: Agent, env: Environment, params: Params, streams: Streams, key: Array, T: int
) -> tuple[Window, Array, Streams]:
    """Takes T steps in every stream; returns (window, value_B after it, streams)."""
    B = len(streams.first_B)
    fixed, keys_and_values = start_acting(agent, params, streams.memory)

    @jax.vmap
    def advance(env_key: Array, begin_key: Array, state: Any, action: Array) -> Any:
        state, seen_X, reward, over = env.step(env_key, state, action)
        restart = functools.partial(jnp.where, over)
        state, seen_X = jax.tree.map(restart, env.begin(begin_key), (state, seen_X))
        return state, seen_X, reward, over

    def step(streams: Streams, key: Array) -> Any:
        keys = jax.random.split(key, 3)
        logits_BA, value_B, memory = act(
            agent, fixed, streams.memory, streams.seen_BX, streams.first_B
        )
        action_B = jax.random.categorical(keys[0], logits_BA)
        env_keys, begin_keys = (jax.random.split(key, B) for key in keys[1:])
        state, seen_BX, reward_B, over_B = advance(
            env_keys, begin_keys, streams.env, action_B
        )
        return_B = streams.gained_B + reward_B
        after = Streams(memory, state, seen_BX, over_B, jnp.where(over_B, 0, return_B))
        return after, Window(
            seen_BTX=streams.seen_BX,
            first_BT=streams.first_B,
            action_BT=action_B,
            logp_BT=log_probability(logits_BA, action_B),
            value_BT=value_B,
            reward_BT=reward_B,
            over_BT=over_B,
            return_BT=return_B,
        )

    keys_T = jax.random.split(key, T)
    start = streams._replace(memory=keys_and_values)
    after, window = jax.lax.scan(step, start, keys_T)
    _, value_B, _ = act(agent, fixed, after.memory, after.seen_BX, after.first_B)
    window = jax.tree.map(lambda x_TB: jnp.swapaxes(x_TB, 0, 1), window)
    # The update reads hidden states, which keys and values do not contain.
    seen = window.seen_BTX, window.first_BT
    _, _, memory = read_window(agent, params, streams.memory, *seen, T)
    return window, value_B, after._replace(memory=memory)


def evaluate(
    agent: Agent, env: Environment, options: Options, params: Params, key: Array
) -> Array:
    """Returns the mean return of new episodes in as many steps as SMOOTHED updates'."""
    keys, T = jax.random.split(key), SMOOTHED * options.steps
    streams = begin(agent, env, options.streams, keys[0])
    window, _, _ = play(agent, env, params, streams, keys[1], T)
    return jnp.mean(window.return_BT, where=window.over_BT)


def keep_best(
    best: Average, record: Record, params: Params, step: Array, window: Window
) -> tuple[Average, Record]:
    """Returns the best policy so far, after a window that `params` have played.

    The returns are averaged over about SMOOTHED windows, with decaying weights, because
    few episodes may end in one.
    """
    kept = 1 - 1 / SMOOTHED
    returns = kept * record.returns + jnp.sum(window.return_BT * window.over_BT)
    episodes = kept * record.episodes + window.over_BT.sum()
    mean = jnp.where(window.over_BT.any(), returns / episodes, -jnp.inf)
    choose = functools.partial(jnp.where, mean >= record.best)
    best = jax.tree.map(choose, Average(params, step), best)
    return best, Record(returns, episodes, jnp.maximum(mean, record.best))


def log_probability(logits_xA: Array, action_x: Array) -> Array:
    """Returns the log-probability of the actions; x are any dimensions."""
    logp_xA = jax.nn.log_softmax(logits_xA)
    return jnp.take_along_axis(logp_xA, action_x[..., None], axis=-1)[..., 0]


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
    params: Params, agent: Agent, options: Options, batch: Batch
) -> tuple[Array, Array]:
    """Returns (PPO's loss, entropy), means over the steps.

    Advantages are normalized for the actor.
    """
    memory, window, gain_BT = batch
    logits_BTA, value_BT, _ = read_window(
        agent, params, memory, window.seen_BTX, window.first_BT, options.call_len
    )
    logp_BT = log_probability(logits_BTA, window.action_BT)
    ratio_BT = jnp.exp(logp_BT - window.logp_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - options.clip, 1 + options.clip)
    scaled_BT = (gain_BT - gain_BT.mean()) / (gain_BT.std() + 1e-8)
    actor = -jnp.minimum(ratio_BT * scaled_BT, clipped_BT * scaled_BT).mean()
    critic = jnp.square(value_BT - window.value_BT - gain_BT).mean() / 2
    logp_BTA = jax.nn.log_softmax(logits_BTA)
    entropy = -(jnp.exp(logp_BTA) * logp_BTA).sum(axis=-1).mean()
    return actor + critic - options.entropy * entropy, entropy


def make_update(
    agent: Agent,
    env: Environment,
    optimizer: optax.GradientTransformation,
    options: Options,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """Returns update(state) -> (state, metrics): a rollout, then PPO's epochs."""
    grad = jax.value_and_grad(loss, has_aux=True)

    def minibatch(carry: Any, batch: Batch) -> Any:
        params, opt_state = carry
        numbers, grads = grad(params, agent, options, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), numbers

    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        before = cast(Streams, state.memory)
        key = jax.random.fold_in(state.rng, state.step)
        window, value_B, after = play(
            agent, env, state.params, before, key, options.steps
        )
        opt_state, record = cast(Any, state.opt_state)
        best, record = keep_best(
            state.average, record, state.params, state.step, window
        )
        batch = Batch(before.memory, window, advantages(window, value_B, options))
        split = functools.partial(split_streams, C=options.minibatches)
        batches = jax.tree.map(split, batch, stream_dimension(batch))
        (params, opt_state), (losses, entropies) = jax.lax.scan(
            lambda carry, _: jax.lax.scan(minibatch, carry, batches),
            (state.params, opt_state),
            length=options.epochs,
        )
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=(opt_state, record),
            memory=cast(Any, after),
            average=best,
        )
        finite = jnp.isfinite(optax.tree.norm(params))
        return state, {
            "loss": jnp.where(finite, losses.mean(), jnp.nan),
            "entropy": entropies.mean(),
            "tokens": jnp.asarray(window.over_BT.size),
            "episodes": window.over_BT.sum(),
            "returns": jnp.sum(window.return_BT * window.over_BT),
        }

    return update
