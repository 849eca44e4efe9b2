"""The memory that a config names: the only place that chooses among the kinds.

empty_memory        for training: hidden states
empty_fixed_memory  for evaluation: keys and values, while the parameters are fixed
one_token_memory    for generation: the same in rings, for one token at a time
"""

import dataclasses

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.cache import Memory
from txl_jax.model.memory.key_values import KeyValueMemory
from txl_jax.model.memory.layout import unstack
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.memory.retrieval import RetrievalMemory
from txl_jax.model.memory.ring import RingMemory


def empty_memory(config: ModelConfig, batch_size: int) -> MemoryLike:
    """Returns the initial memory of a training."""
    return with_store(config, Memory.empty(config, batch_size))


def lay_out(config: ModelConfig, params: Params) -> Params:
    """Returns the parameters as `empty_fixed_memory` reads them; call it once."""
    return unstack(params)


def empty_fixed_memory(
    config: ModelConfig,
    params: Params,
    batch_size: int,
    tgt_len: int,
    window_len: int = 0,
) -> MemoryLike:
    """Returns the initial memory for calls of tgt_len tokens with fixed parameters.

    `params` are those of `lay_out`. window_len: see `KeyValueMemory.empty`.
    """
    memory = KeyValueMemory.empty(
        config, params, batch_size, tgt_len, window_len=window_len
    )
    return with_store(config, memory)


def one_token_memory(config: ModelConfig, memory: MemoryLike) -> MemoryLike:
    """Returns a memory of `empty_fixed_memory` for calls of one token."""
    if isinstance(memory, RetrievalMemory):
        local = one_token_memory(config, memory.local)
        return dataclasses.replace(memory, local=local)
    assert isinstance(memory, KeyValueMemory)
    return RingMemory.of(config, memory)


def with_store(config: ModelConfig, local: MemoryLike) -> MemoryLike:
    """Adds an empty store if a layer of the model retrieves."""
    return RetrievalMemory.of(config, local) if config.retrieval_len else local
