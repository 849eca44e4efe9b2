"""The state of a training run on the devices, passed from update to update."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from txl_jax.model.initializers import Params
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.segment import Segment


@flax.struct.dataclass
class Average:
    """A mean of parameters; count (int32) is the number of updates in it."""

    params: Params
    count: Array


@flax.struct.dataclass
class TrainState:
    """Parameters, optimizer, memory and randomness; the data's Position is separate.

    step (int32) counts updates. rng never changes: update k folds k into it. average is
    an Average, or () in a run without averaging. skipped_in_row (int32) counts the
    updates that were skipped since the last one made.
    """

    step: Array
    params: Params
    opt_state: optax.OptState
    memory: MemoryLike
    rng: Array
    average: Any = ()
    skipped_in_row: Array = flax.struct.field(
        default_factory=lambda: jnp.zeros((), jnp.int32)
    )

    @property
    def evaluated(self) -> Params:
        """The parameters that are validated: their mean in a run with an average."""
        return self.average.params if self.average else self.params

    def start_from(self, params: Params) -> "TrainState":
        """Replaces the parameters of a fresh state, and their mean."""
        average = self.average
        if average:  # copied: a step donates every array of the state
            copied = jax.tree.map(jnp.copy, params)
            average = dataclasses.replace(average, params=copied)
        return dataclasses.replace(self, params=params, average=average)


Metrics = dict[str, Array]  # by name; [U] for the updates of a call
# (state, segments) -> (state, metrics). Jitted, in Program, it donates the state.
TrainStep = Callable[[TrainState, Segment], tuple[TrainState, Metrics]]


class Program(NamedTuple):
    """The jitted functions of a run, and the shardings of its state."""

    init: Callable[[], TrainState]  # makes a fresh state
    shardings: TrainState  # of the state
    step: jax.stages.Wrapped  # a jitted TrainStep
