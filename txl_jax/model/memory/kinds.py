"""The memory that a config names, for training, evaluation and generation.

empty_memory        for training: hidden states
empty_fixed_memory  for evaluation: keys and values, while the parameters are fixed
one_token_memory    for generation: the same in rings, for one token at a time

With `ModelConfig.keeps_states`, the first one serves all of them.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.cache import CacheLayer, Memory
from txl_jax.model.memory.compressive import CompressiveMemory
from txl_jax.model.memory.fast_weights import FastMemory, open_fast
from txl_jax.model.memory.key_values import KeyValueMemory, project_states
from txl_jax.model.memory.memory_tokens import TokenMemory, make_tokens, open_tokens
from txl_jax.model.memory.protocol import (
    AnyMemory,
    CallMemory,
    Kept,
    LayerMemory,
    MemoryLike,
)
from txl_jax.model.memory.retrieval import RetrievalMemory, make_gate, open_store
from txl_jax.model.memory.ring import RingMemory


def empty_memory(config: ModelConfig, batch_size: int) -> MemoryLike:
    """Returns the initial memory of a training."""
    if config.compressed_len:
        return CompressiveMemory.empty(config, batch_size)
    if config.memory_tokens:
        return TokenMemory.empty(config, batch_size)
    return with_store(config, Memory.empty(config, batch_size))


def make_parameter(module: nn.Module, config: ModelConfig) -> Array | None:
    """Returns the parameter that the kind of memory adds outside the layers, if any."""
    if config.retrieval_len:
        return make_gate(module, config)
    return make_tokens(module, config) if config.memory_tokens else None


def open_memory(
    config: ModelConfig,
    memory: MemoryLike,
    parameter: Array | None,
    L: int,
    first_BL: Array | None,
    length_B: Array | None,
    segment_len: int,
) -> CallMemory:
    """Returns the memory as a call of L tokens reads it; see `TransformerXL.__call__`.

    parameter: that of `make_parameter`.
    """
    if config.retrieval_len:
        assert parameter is not None
        return open_store(memory, parameter, first_BL, L)
    if config.memory_tokens:
        assert parameter is not None
        return open_tokens(memory, parameter, L, first_BL, length_B, segment_len)
    if config.fast_weights:
        return open_fast(memory, L, first_BL, length_B)
    if isinstance(memory, CompressiveMemory):
        return dataclasses.replace(memory, length_B=length_B)
    opened: Any = memory
    return opened


def added_losses(
    config: ModelConfig, memory: MemoryLike, tokens_B: Array
) -> dict[str, Array]:
    """Returns the losses of the memory beside the nll, by their names in the metrics.

    Each is a sum over streams, weighted by their scored tokens.
    """
    if config.compression == "conv" and isinstance(memory, CompressiveMemory):
        return {"reconstruction_mse": jnp.sum(memory.error_B * tokens_B)}
    return {}


def empty_fixed_memory(
    config: ModelConfig,
    params: Params,
    batch_size: int,
    tgt_len: int,
    window_len: int = 0,
) -> MemoryLike:
    """Returns the initial memory for calls of tgt_len tokens with fixed parameters.

    `params` are laid out by `calls.fixed_model`. window_len: see `KeyValueMemory`.
    """
    if config.keeps_states:
        return empty_memory(config, batch_size)
    memory = KeyValueMemory.empty(
        config, params, batch_size, tgt_len, window_len=window_len
    )
    return with_store(config, memory)


def one_token_memory(
    config: ModelConfig, params: Params, memory: MemoryLike
) -> MemoryLike:
    """Returns a memory of any number of tokens for calls of one token.

    `params` are laid out by `calls.fixed_model`.
    """
    if isinstance(memory, FastMemory):
        memory = memory.with_key_values(config, params, tgt_len=1)
    if isinstance(memory, RetrievalMemory | FastMemory):
        local = one_token_memory(config, params, memory.local)
        return dataclasses.replace(memory, local=local)
    if isinstance(memory, Memory) and not config.keeps_states:
        memory = KeyValueMemory.of(config, params, memory, tgt_len=1)
    if isinstance(memory, KeyValueMemory):
        return RingMemory.of(config, memory)
    return memory


def show_zeros(memory: AnyMemory, where_B: Array) -> AnyMemory:
    """Returns the memory with visible zeros in the streams where_B (bool).

    Models of TensorFlow and Hugging Face start so (initial_memory = "zeros"), which no
    later kind of memory combines with.
    """
    where_B11 = where_B[:, None, None]
    zeroed: Any
    if isinstance(memory, KeyValueMemory):

        def zero(x_HBKA: Array, zero_HA: Array) -> Array:
            zero_H11A = zero_HA.astype(x_HBKA.dtype)[:, None, None]
            return jnp.where(where_B11, zero_H11A, x_HBKA)

        layers = [
            dataclasses.replace(
                layer,
                k_HBKA=zero(layer.k_HBKA, layer.zero_HA[0]),
                v_HBKA=zero(layer.v_HBKA, layer.zero_HA[1]),
            )
            for layer in memory.layers
        ]
        zeroed = dataclasses.replace(memory, layers=tuple(layers))
    else:
        assert isinstance(memory, Memory)
        h_NBMD = jax.lax.cond(
            jnp.any(where_B),
            lambda h: jnp.where(where_B11, 0, h),
            lambda h: h,
            memory.h_NBMD,
        )
        zeroed = dataclasses.replace(memory, h_NBMD=h_NBMD)
    filled_B = jnp.where(where_B, memory.mem_len, memory.filled_B)
    return dataclasses.replace(zeroed, filled_B=filled_B)


def with_store(config: ModelConfig, local: MemoryLike) -> MemoryLike:
    """Adds an empty store if a layer retrieves, or fast weights if the layers have."""
    if config.fast_weights:
        return FastMemory.of(config, local)
    return RetrievalMemory.of(config, local) if config.retrieval_len else local


def keep_outputs(
    config: ModelConfig,
    attention: nn.Module,
    layer: LayerMemory,
    kept: Kept,
    h_BLD: Array,
) -> Kept:
    """Returns what a layer keeps, given its output and what its attention keeps.

    With recurrence = "same" (Ding et al. 2021, ERNIE-Doc, equation 5) it is the output
    itself, where the paper keeps the input. Each segment then lengthens the reach by a
    segment, without limit, and layer n of a segment needs layer n of the one before:
    segments are read one after the other. A memory of keys and values keeps those of
    the output, with the same projections.
    """
    if config.recurrence == "below":
        return kept
    if isinstance(layer, CacheLayer):
        return h_BLD
    params = dict(attention.variables["params"])
    outputs = project_states(config, params, h_BLD)
    M = kept[0].shape[1] - h_BLD.shape[1]
    return tuple(
        jnp.concatenate([x_BKHA[:, :M], own_BLHA], axis=1)
        for x_BKHA, own_BLHA in zip(kept, outputs, strict=True)
    )
