"""Fresh parameters, and the fresh state of a run."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import empty_memory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import Tree, letters, shardings
from txl_jax.update.state import Average, TrainState


def init_params(config: ModelConfig, key: Array) -> Params:
    """Returns fresh parameters, each boxed with the letters of its dimensions."""
    tokens_BL = jnp.zeros((1, 1), jnp.int32)
    # The parameters do not depend on the kernel, and "xla" runs on every device.
    model = TransformerXL(dataclasses.replace(config, kernel="xla"))
    memory = empty_memory(config, 1)
    return model.init(key, tokens_BL, tokens_BL, memory, method="nll")["params"]


@functools.cache
def abstract_params(config: ModelConfig) -> Params:
    """Returns the shapes of the parameters, boxed with their letters."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    seed: int,
    mesh: Mesh,
    averages: bool = False,
) -> tuple[Callable[[], TrainState], TrainState]:
    """Returns (init, shardings) of a fresh state; init() makes it.

    init is jitted with these shardings, so a sharded model is never whole on a device.
    averages adds a mean of the parameters with the parameters' shardings.
    """

    def create() -> TrainState:
        key_params, key_run = jax.random.split(jax.random.key(seed))
        params = init_params(config, key_params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            memory=empty_memory(config, batch_size),
            rng=key_run,
            average=Average(params, jnp.zeros((), jnp.int32)) if averages else (),
        )

    def without_empty(box: Tree) -> Tree:
        """Unboxes the places of parameters that a part of the optimizer lacks."""
        return box if jax.tree.leaves(box) else nn.unbox(box)

    is_box = nn.meta.is_axis_metadata
    state = jax.tree.map(without_empty, jax.eval_shape(create), is_leaf=is_box)
    specs = nn.get_partition_spec(state)
    specs = dataclasses.replace(specs, memory=letters(specs.memory))
    placed = shardings(mesh, specs)
    return jax.jit(lambda: nn.unbox(create()), out_shardings=placed), placed
