"""Actor and critic on a memory: a Transformer-XL, or a GRU of as many parameters.

A window of steps is read in two ways, with the same results: step by step while the
agent acts, and in long pieces, of which gradients are computed.

Dims: B streams, T steps of a window, L steps of a call, X numbers observed, D features,
A actions.
"""

import bisect
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory import Memory
from txl_jax.model.memory.key_values import KeyValueMemory
from txl_jax.model.memory.layout import unstack
from txl_jax.model.memory.ring import RingMemory
from txl_jax.model.txl import TransformerXL


class GRUMemory(NamedTuple):
    """The state of a GRU."""

    h_BD: Array


AgentMemory = Memory | GRUMemory


class GRU(nn.Module):
    """The baseline (Cho et al. 2014), which is called like a `TransformerXL`."""

    features: int

    @nn.compact
    def __call__(
        self, _: None, memory: GRUMemory, *, inputs_BLD: Array, first_BL: Array
    ) -> tuple[Array, GRUMemory]:
        """Returns (hidden_BLD, memory); an episode starts from zeros."""

        def step(cell: nn.Module, h_BD: Array, xs: tuple[Array, Array]) -> Any:
            inputs_BD, first_B = xs
            return cell(jnp.where(first_B[:, None], 0, h_BD), inputs_BD)

        read = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        cell = nn.GRUCell(self.features, name="cell")
        h_BD, hidden_BLD = read(cell, memory.h_BD, (inputs_BLD, first_BL))
        return hidden_BLD, GRUMemory(h_BD)


class Agent(nn.Module):
    """The logits of the actions and the expected return, from hidden states."""

    core: nn.Module
    d_model: int
    actions: int

    @nn.compact
    def __call__(
        self, seen_BLX: Array, first_BL: Array, memory: Any
    ) -> tuple[Array, Array, Any]:
        """Returns (logits_BLA, value_BL, memory).

        first_BL (bool): an episode starts at this step and sees nothing before it.
        """
        inputs_BLD = nn.Dense(self.d_model, name="encoder")(seen_BLX)
        hidden_BLD, memory = self.core(
            None, memory, inputs_BLD=inputs_BLD, first_BL=first_BL
        )
        hidden_BLD = nn.LayerNorm(name="norm")(hidden_BLD)
        # Small logits: every action is tried at first.
        small = nn.initializers.normal(0.01)
        logits_BLA = nn.Dense(self.actions, kernel_init=small, name="actor")(hidden_BLD)
        value_BL1 = nn.Dense(1, kernel_init=small, name="critic")(hidden_BLD)
        return logits_BLA, value_BL1[..., 0], memory

    def empty(self, batch_size: int) -> AgentMemory:
        """Returns the memory at the start."""
        if isinstance(self.core, TransformerXL):
            return Memory.empty(self.core.config, batch_size)
        return GRUMemory(jnp.zeros((batch_size, self.core.features)))

    def init_params(self, key: Array, observed: int) -> Params:
        """Returns fresh parameters."""
        seen_BLX, first_BL = jnp.zeros((1, 1, observed)), jnp.ones((1, 1), bool)
        return nn.unbox(self.init(key, seen_BLX, first_BL, self.empty(1))["params"])

    def count(self, observed: int) -> int:
        """Returns the number of parameters."""
        params = jax.eval_shape(lambda: self.init_params(jax.random.key(0), observed))
        return sum(leaf.size for leaf in jax.tree.leaves(params))


def transformer_agent(config: ModelConfig, actions: int) -> Agent:
    """Returns an agent with a Transformer-XL.

    With config.same_length and same_length_self, every query sees the mem_len keys
    before it and its own, however many steps a call has.
    """
    return Agent(TransformerXL(config), config.d_model, actions)


def gru_agent(other: Agent, observed: int) -> Agent:
    """Returns an agent with the least GRU that gives it as many parameters as `other`.

    The observations have as many features.
    """

    def agent(features: int) -> Agent:
        return Agent(GRU(features), other.d_model, other.actions)

    sizes = range(1, 100 * other.d_model)
    target = other.count(observed)
    return agent(
        1 + bisect.bisect_left(sizes, target, key=lambda n: agent(n).count(observed))
    )


def start_acting(
    agent: Agent, params: Params, memory: AgentMemory
) -> tuple[Params, Any]:
    """Returns the parameters and the memory for calls of one step.

    While the parameters stand still, keys and values are computed once.
    """
    if not (isinstance(agent.core, TransformerXL) and isinstance(memory, Memory)):
        return params, memory
    config, core = agent.core.config, unstack(params["core"])
    key_values = KeyValueMemory.of(config, core, memory, tgt_len=1)
    return {**params, "core": core}, RingMemory.of(config, key_values)


def read(
    agent: Agent,
    params: Params,
    memory: AgentMemory,
    seen_BTX: Array,
    first_BT: Array,
    L: int,
) -> tuple[Array, Array, AgentMemory]:
    """Returns (logits_BTA, value_BT, memory) after a window, read L steps at a time.

    Gradients pass through the memory between the steps of a call, not between calls.
    """

    def split(x_BT: Array) -> Array:
        B, T = x_BT.shape[:2]
        return jnp.swapaxes(x_BT.reshape(B, T // L, L, *x_BT.shape[2:]), 0, 1)

    def join(x_SBL: Array) -> Array:
        S, B = x_SBL.shape[:2]
        return jnp.swapaxes(x_SBL, 0, 1).reshape(B, S * L, *x_SBL.shape[3:])

    def call(memory: AgentMemory, xs: tuple[Array, Array]) -> Any:
        memory = jax.lax.stop_gradient(memory)
        result: Any = agent.apply({"params": params}, *xs, memory)
        return result[2], result[:2]

    memory, outputs = jax.lax.scan(call, memory, (split(seen_BTX), split(first_BT)))
    logits_BTA, value_BT = map(join, outputs)
    return logits_BTA, value_BT, memory
