"""Environments of gymnax (Lange 2022, extra `gymnax`) as an `Environment`."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from txl_jax.errors import UserError, require_one_of

from .environments import Environment


def adapt(name: str) -> Environment:
    """Returns gymnax's environment of that name, with its default parameters.

    A time limit ends an episode like any other end. Raises UserError if gymnax is
    missing, has no such environment, or the environment has no discrete actions.
    """
    try:
        import gymnax
        from gymnax.environments.spaces import Discrete
    except ImportError as error:
        raise UserError(
            f"gymnax = {name!r} needs gymnax: pip install 'txl_jax[gymnax]'"
        ) from error
    require_one_of(name, gymnax.registered_envs, "gymnax")
    env, params = gymnax.make(name)
    space = env.action_space(params)
    if not isinstance(space, Discrete):
        raise UserError(f"gymnax = {name!r} has no discrete actions: choose another")

    def flat(seen: Array) -> Array:
        return jnp.ravel(seen).astype(jnp.float32)

    def begin(key: Array) -> tuple[Any, Array]:
        seen, state = env.reset_env(key, params)
        return state, flat(seen)

    def step(key: Array, state: Any, action: Array) -> Any:
        seen, state, reward, over, _ = env.step_env(key, state, action, params)
        over = jnp.asarray(over, bool) | env.is_truncated(state, params)
        return state, flat(seen), jnp.asarray(reward, jnp.float32), over

    observed = math.prod(env.observation_space(params).shape)
    return Environment(begin, step, observed, space.n)
