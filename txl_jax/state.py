"""Everything that a training run carries from update to update, on the devices.

Dims: N layers, B streams, M memory, D model.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from txl_jax.guard import Guard
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.optim import Average
from txl_jax.sharding import shardings


@flax.struct.dataclass
class TrainState:
    """Parameters, optimiser, memory and randomness; where the data stands is not here.

    step (int32) counts updates. rng never changes: update k folds k into it. average
    is an Average, or () in a run that evaluates its parameters themselves. guard says
    which updates have been skipped lately, and what the next one is judged by.
    """

    step: Array
    params: Any
    opt_state: Any
    memory: Memory
    rng: Array
    average: Any = ()
    guard: Guard = flax.struct.field(default_factory=Guard.fresh)

    @property
    def evaluated(self) -> Any:
        """The parameters that the run is judged by: their mean, where it has one."""
        return self.average.params if self.average else self.params

    def start_from(self, params: Any) -> "TrainState":
        """Returns the state with other parameters to begin with, before any update."""
        average = self.average
        if average:  # a copy, since a step is given each array of the state to reuse
            copied = jax.tree.map(jnp.copy, params)
            average = dataclasses.replace(average, params=copied)
        return dataclasses.replace(self, params=params, average=average)


def init_params(config: ModelConfig, key: Array) -> Any:
    """Returns fresh parameters, each boxed with the letters of its dimensions."""
    tokens_BL = jnp.zeros((1, 1), jnp.int32)
    # Parameters know no kernel, and this may run where the config's cannot.
    model = TransformerXL(dataclasses.replace(config, kernel="xla"))
    memory = Memory.empty(config, 1)
    return model.init(key, tokens_BL, tokens_BL, memory, method="nll")["params"]


def abstract_params(config: ModelConfig) -> Any:
    """Returns the shapes of the parameters, boxed with their letters."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    seed: int,
    mesh: Mesh,
    averages: bool = False,
) -> tuple[Any, Any]:
    """Returns (init, shardings) of a fresh state: call init() to make it.

    averages: it has a mean of the parameters, which lives where they do.

    It is made sharded, so that no device ever holds a whole model that does not fit;
    `jax.eval_shape(init)` gives its shapes without making it.
    """

    def create() -> TrainState:
        key_params, key_run = jax.random.split(jax.random.key(seed))
        params = init_params(config, key_params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            memory=Memory.empty(config, batch_size),
            rng=key_run,
            average=Average(params, jnp.zeros((), jnp.int32)) if averages else (),
        )

    letters = nn.get_partition_spec(jax.eval_shape(create))
    placed = shardings(mesh, dataclasses.replace(letters, memory=Memory.LETTERS))
    return jax.jit(lambda: nn.unbox(create()), out_shardings=placed), placed
