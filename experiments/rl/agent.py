"""Actor and critic on a memory: a Transformer-XL, or a GRU of as many parameters.

A window of steps is read in two ways, with the same results: step by step while the
agent acts, and in long pieces for gradients.

Dims: B streams, T steps of a window, L steps of a call, X numbers observed, D features,
A actions.
"""

import bisect
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL, lay_out
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
from txl_jax.model.ring import RingMemory
from txl_jax.model.txl import TransformerXL

from .options import Options


class GRUMemory(NamedTuple):
    """The state of a GRU."""

    h_BD: Array


class GRU(nn.Module):
    """The baseline (Cho et al. 2014)."""

    features: int

    @nn.compact
    def __call__(
        self, inputs_BLD: Array, memory: GRUMemory, *, first_BL: Array
    ) -> tuple[Array, GRUMemory]:
        """Returns (hidden_BLD, memory); an episode starts from zeros."""

        def step(cell: nn.Module, h_BD: Array, xs: tuple[Array, Array]) -> Any:
            inputs_BD, first_B = xs
            return cell(jnp.where(first_B[:, None], 0, h_BD), inputs_BD)

        cell = nn.GRUCell(self.features, name="cell")
        read = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        h_BD, hidden_BLD = read(cell, memory.h_BD, (inputs_BLD, first_BL))
        return hidden_BLD, GRUMemory(h_BD)


class Agent(nn.Module):
    """The logits of the actions and the expected return, from hidden states."""

    core: Any  # a TransformerXL or a GRU
    d_model: int
    observed: int  # X
    actions: int

    def setup(self) -> None:
        """Creates the layers around the core."""
        self.encoder, self.norm = nn.Dense(self.d_model), nn.LayerNorm()
        # Small logits: every action is tried at first.
        small = nn.initializers.normal(0.01)
        self.actor = nn.Dense(self.actions, kernel_init=small)
        self.critic = nn.Dense(1, kernel_init=small)

    def __call__(
        self, seen_BLX: Array, first_BL: Array, memory: Any
    ) -> tuple[Array, Array, Any]:
        """Returns (logits_BLA, value_BL, memory).

        first_BL (bool): an episode starts at this step and sees nothing before it.
        """
        is_gru = isinstance(self.core, GRU)
        read = self.core if is_gru else self.core.read_inputs
        hidden_BLD, memory = read(self.encode(seen_BLX), memory, first_BL=first_BL)
        return *self.decide(hidden_BLD), memory

    def encode(self, seen_BLX: Array) -> Array:
        """Returns the core's inputs_BLD."""
        inputs_BLD: Array = self.encoder(seen_BLX)
        return inputs_BLD

    def decide(self, hidden_BLD: Array) -> tuple[Array, Array]:
        """Returns (logits_BLA, value_BL)."""
        hidden_BLD = self.norm(hidden_BLD)
        return self.actor(hidden_BLD), self.critic(hidden_BLD)[..., 0]

    def empty(self, batch_size: int) -> Memory | GRUMemory:
        """Returns the memory at the start."""
        if isinstance(self.core, TransformerXL):
            return Memory.empty(self.core.config, batch_size)
        return GRUMemory(jnp.zeros((batch_size, self.core.features)))

    def init_params(self, key: Array) -> Params:
        """Returns fresh parameters."""
        seen_BLX, first_BL = jnp.zeros((1, 1, self.observed)), jnp.ones((1, 1), bool)
        return nn.unbox(self.init(key, seen_BLX, first_BL, self.empty(1))["params"])


def make_agent(options: Options, observed: int, actions: int) -> Agent:
    """Returns the agent that the flags describe.

    With same_length and same_length_self, every query of the Transformer-XL sees the
    mem_len keys before it and its own, however many steps a call has. The GRU is the
    smallest with at least as many parameters.
    """
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
        fast_weights=options.fast_weights,
        dropout=0.0,
        init_std=options.d_model**-0.5,
    )

    def agent(core: nn.Module) -> Agent:
        return Agent(core, options.d_model, observed, actions)

    transformer = agent(TransformerXL(config))
    if options.core == "transformer_xl":
        return transformer
    grus = [agent(GRU(n)) for n in range(1, 10 * options.n_layer * options.d_model)]
    return grus[bisect.bisect_left(grus, count(transformer), key=count)]


def count(agent: Agent) -> int:
    """Returns the number of parameters."""
    params = jax.eval_shape(lambda: agent.init_params(jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def start_acting(
    agent: Agent, params: Params, memory: Memory | GRUMemory
) -> tuple[Params, RingMemory | GRUMemory]:
    """Returns parameters and memory for `act`.

    While the parameters stand still, keys and values are computed once.
    """
    if isinstance(memory, GRUMemory):
        return params, memory
    params = {**params, "core": lay_out(params["core"])}
    return params, RingMemory.of(agent.core.config, params["core"], memory)


def act(
    agent: Agent,
    params: Params,
    memory: RingMemory | GRUMemory,
    seen_BX: Array,
    first_B: Array,
) -> tuple[Array, Array, RingMemory | GRUMemory]:
    """Returns (logits_BA, value_B, memory) after one step; see `start_acting`."""
    seen_BLX, first_BL = seen_BX[:, None], first_B[:, None]
    apply: Any = functools.partial(agent.apply, {"params": params})
    if isinstance(memory, GRUMemory):
        logits_BLA, value_BL, memory = apply(seen_BLX, first_BL, memory)
    else:
        inputs_BLD = apply(seen_BLX, method="encode")
        core = FixedTransformerXL(agent.core.config, params["core"])
        hidden_BLD, memory = core.read_inputs(inputs_BLD, memory, first_BL=first_BL)
        logits_BLA, value_BL = apply(hidden_BLD, method="decide")
    return logits_BLA[:, 0], value_BL[:, 0], memory


def read_window(
    agent: Agent, params: Params, memory: Any, seen_BTX: Array, first_BT: Array, L: int
) -> tuple[Array, Array, Any]:
    """Returns (logits_BTA, value_BT, memory) after a window, read L steps at a time.

    Gradients pass through the memory between the steps of a call, not between calls.
    """

    def call(memory: Any, xs: tuple[Array, Array]) -> Any:
        memory = jax.lax.stop_gradient(memory)
        result: Any = agent.apply({"params": params}, *xs, memory)
        return result[2], result[:2]

    def calls(x_BT: Array) -> Array:
        return jnp.stack(jnp.split(x_BT, x_BT.shape[1] // L, axis=1))

    memory, outputs = jax.lax.scan(call, memory, (calls(seen_BTX), calls(first_BT)))
    logits_BTA, value_BT = (jnp.concatenate([*x], axis=1) for x in outputs)
    return logits_BTA, value_BT, memory
