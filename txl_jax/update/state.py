"""The state of a training run on the devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import Tree, abstract, letters, sharding, shardings


@flax.struct.dataclass
class Average:
    """The mean of the parameters over `count` (int32) updates; if 0, the newest."""

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
    memory: Memory
    rng: Array
    average: Any = ()
    skipped_in_row: Array = flax.struct.field(
        default_factory=lambda: jnp.zeros((), jnp.int32)
    )

    @property
    def evaluated(self) -> Params:
        """The parameters to validate: their mean in a run with an average."""
        return self.average.params if self.average else self.params

    def start_from(self, params: Params) -> "TrainState":
        """Replaces the parameters of a fresh state, and their mean."""
        average = self.average
        if average:  # copied: a step donates every array of the state
            copied = jax.tree.map(jnp.copy, params)
            average = dataclasses.replace(average, params=copied)
        return dataclasses.replace(self, params=params, average=average)


Metrics = dict[str, Array]  # by name; [U] for the updates of a call


class Updater(NamedTuple):
    """Creates and updates the state of a run; both functions are jitted."""

    init: Callable[[], TrainState]  # makes a fresh state
    like: TrainState  # shapes, dtypes and shardings
    step: jax.stages.Wrapped  # (state, segments) -> (state, metrics)


def jit_step(
    step: Callable[..., tuple[TrainState, Metrics]], like: TrainState
) -> jax.stages.Wrapped:
    """Returns the jitted step, whose new state replaces the old one in place."""
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(places, None),
        keep_unused=True,  # the result is on the devices of all arguments
    )


def init_params(config: ModelConfig, key: Array) -> Params:
    """Returns fresh parameters, each boxed with the letters of its dimensions."""
    tokens_BL = jnp.zeros((1, 1), jnp.int32)
    # The parameters do not depend on the kernel, and "xla" runs on every device.
    model = TransformerXL(dataclasses.replace(config, kernel="xla"))
    memory = Memory.empty(config, 1)
    return model.init(key, tokens_BL, tokens_BL, memory, method="nll")["params"]


@functools.cache
def abstract_params(config: ModelConfig) -> Params:
    """Returns the shapes of the parameters, boxed with their letters."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def parameter_count(params: Params) -> int:
    """Returns the number of scalars in a pytree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def like_params(model: ModelConfig, mesh: Mesh) -> Params:
    """Returns the parameters' shapes, dtypes and shardings on the mesh."""
    shapes = abstract_params(model)
    places = shardings(mesh, nn.get_partition_spec(shapes))
    return abstract(nn.unbox(shapes), places)


def abstract_segments(mesh: Mesh, S: int, B: int, L: int) -> Segment:
    """Returns the shapes and shardings of a batch of segments on the mesh."""

    def array(dtype: str, *shape: int) -> Any:
        place = sharding(mesh, "SBL"[: len(shape)])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    tokens_SBL, first_SBL = array("int32", S, B, L), array("bool", S, B, L)
    weights_SBL, length_SB = array("float32", S, B, L), array("int32", S, B)
    return Segment(tokens_SBL, tokens_SBL, weights_SBL, first_SBL, length_SB)


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    seed: int,
    mesh: Mesh,
    averages: bool = False,
) -> tuple[Callable[[], TrainState], TrainState]:
    """Returns (init, like) of a fresh state, which init() makes; like: see `Updater`.

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
            memory=Memory.empty(config, batch_size),
            rng=key_run,
            average=Average(params, jnp.zeros((), jnp.int32)) if averages else (),
        )

    def without_empty(box: Tree) -> Tree:
        """Unboxes the places of parameters that a part of the optimizer leaves out."""
        return box if jax.tree.leaves(box) else nn.unbox(box)

    is_box = nn.meta.is_axis_metadata
    state = jax.tree.map(without_empty, jax.eval_shape(create), is_leaf=is_box)
    specs = nn.get_partition_spec(state)
    specs = dataclasses.replace(specs, memory=letters(specs.memory))
    places = shardings(mesh, specs)
    init = jax.jit(lambda: nn.unbox(create()), out_shardings=places)
    return init, abstract(nn.unbox(state), places)
