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

from txl_jax.model.initializers import Params
from txl_jax.update.state import Metrics, TrainState
from txl_jax.update.step import split_streams, stream_dimension

from .agent import Agent, AgentMemory, read, start_acting
from .environments import Environment
from .options import Options


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
        seen_BLX, first_BL = streams.seen_BX[:, None], streams.first_B[:, None]
        result: Any = agent.apply(
            {"params": params}, seen_BLX, first_BL, streams.memory
        )
        logits_BLA, value_BL, memory = result
        return logits_BLA[:, 0], value_BL[:, 0], memory

    def step(streams: Streams, key: Array) -> Any:
        keys = jax.random.split(key, 3)
        logits_BA, value_B, memory = act(streams)
        action_B = jax.random.categorical(keys[0], logits_BA)
        env_keys, begin_keys = (jax.random.split(key, B) for key in keys[1:])
        state, seen_BX, reward_B, over_B = jax.vmap(env.step)(
            env_keys, streams.env, action_B
        )
        return_B = streams.gained_B + reward_B

        def restart(new: Array, old: Array) -> Array:
            return jnp.where(over_B.reshape(B, *[1] * (old.ndim - 1)), new, old)

        fresh = jax.vmap(env.begin)(begin_keys)
        state, seen_BX = jax.tree.map(restart, fresh, (state, seen_BX))
        after = Streams(memory, state, seen_BX, over_B, jnp.where(over_B, 0, return_B))
        return after, Window(
            seen_BTX=streams.seen_BX,
            first_BT=streams.first_B,
            action_BT=action_B,
            log_p_BT=log_probability(logits_BA, action_B),
            value_BT=value_B,
            reward_BT=reward_B,
            over_BT=over_B,
            return_BT=return_B,
        )

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
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
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
        _, _, memory = read(
            agent,
            params,
            before.memory,
            window.seen_BTX,
            window.first_BT,
            options.steps,
        )

        split = functools.partial(split_streams, C=options.minibatches)
        axes = stream_dimension(before.memory)
        memories = jax.tree.map(split, before.memory, axes)
        steps = jax.tree.map(lambda x_BT: split(x_BT, 0), (window, gain_BT))
        (params, opt_state), (losses, entropies) = learn(
            params, state.opt_state, (memories, *steps)
        )
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
