"""What a memory costs and gives, by counting (sections 3.2 and 3.3).

Bytes of the cache, how far back a prediction can depend, what segments without memory
lose, how alike the encodings of two distances are, and whether a model can tell the
order of what it remembers.

Dims: B streams, L segment, M memory, N layers, D model, H heads, A head, R distances,
V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.positions import sinusoid_RD
from txl_jax.model.txl import TransformerXL


def account(config: ModelConfig, batch_size: int, tgt_len: int) -> dict[str, Any]:
    """Returns the memory's bytes, how many tokens back it reaches, and what that saves.

    cache_bytes is the paper's cache of hidden states, N x M x D x B numbers. Evaluation
    and generation keep keys and values instead, in slots for memory and segment:
    key_value_bytes, 2 x N x (M + L) x H x A x B numbers. lost_without_memory is the
    share of the dependencies in its reach that segments alone would lose.
    """
    context = effective_context(config, tgt_len)
    N, M, itemsize = config.n_layer, config.mem_len, config.memory_dtype.itemsize
    slots = 2 * N * (M + tgt_len) * config.n_head * config.d_head
    return {
        "cache_bytes": N * M * config.d_model * batch_size * itemsize,
        "key_value_bytes": slots * batch_size * itemsize,
        "effective_context_tokens": context,
        "lost_without_memory": lost_share(context, tgt_len) if context else 0.0,
    }


def describe(config: ModelConfig, batch_size: int, tgt_len: int) -> str:
    """Returns the same as one line."""
    N, M, D = config.n_layer, config.mem_len, config.d_model
    if not M:
        return f"no memory: no token depends on more than its segment of {tgt_len}"
    found = account(config, batch_size, tgt_len)
    mega = {key: f"{found[key] / 1e6:,.1f} MB" for key in found}
    return (
        f"memory: {N} layers x {M} tokens x {D} x {batch_size} streams x "
        f"{config.memory_dtype.itemsize} bytes = {mega['cache_bytes']} "
        f"({mega['key_value_bytes']} where kept as keys and values); it reaches "
        f"{found['effective_context_tokens']:,} tokens back"
    )


def effective_context(config: ModelConfig, tgt_len: int) -> int:
    """Returns how many tokens before a segment its first prediction can depend on.

    The paper's O(N x L): exactly N x M where M is L or a multiple of it. The oldest of
    M remembered tokens was itself read in a segment, whose first token saw M before
    it; so every layer but the last one reaches M rounded up to whole segments. With
    same_length every token sees as many keys, so each layer reaches that far from the
    token itself, and the first sees itself besides.
    """
    N, M, L = config.n_layer, config.mem_len, tgt_len
    if not M:
        return 0
    if config.same_length:
        return N * (M - 1 + config.same_length_self)
    return (N - 1) * -(-M // L) * L + M


def lost_share(context: int, tgt_len: int) -> float:
    """Returns the share of dependencies that segments of L without memory lose.

    Of all pairs of tokens at most `context` apart, in a long text, those with a
    segment's border between them. A border falls between tokens d apart with
    probability min(d / L, 1); the mean over d = 1, ..., c is (c + 1) / 2L for c <= L,
    and 1 - (L - 1) / 2c beyond.
    """
    c, L = context, tgt_len
    return (c + 1) / (2 * L) if c <= L else 1 - (L - 1) / (2 * c)


def distance_similarity(config: ModelConfig, distances_R: np.ndarray) -> np.ndarray:
    """Returns the cosine of the encodings R of two distances that are so far apart.

    It depends on their difference alone: the mean of cos(d f_k) over the frequencies.
    """
    rows_RD = np.asarray(sinusoid_RD(jnp.asarray(distances_R), config.d_model))
    zero_D = np.asarray(sinusoid_RD(jnp.zeros(1), config.d_model))[0]
    # sin^2 + cos^2 = 1 for each of the D / 2 frequencies.
    return rows_RD @ zero_D / (config.d_model / 2)


def order_confusion(config: ModelConfig, params: Any, tokens_B3L: np.ndarray) -> float:
    """Returns how much a prediction depends on the order of the memory, in nats.

    Two segments are read, then a third, once with the memory as it is and once with
    what is remembered of the two in the other order. The mean absolute difference of
    the third's log-probabilities is 0, but for rounding, where positions are those of
    a token in its own segment (section 3.3's temporal confusion): a sum over keys has
    no order. config.mem_len is not used.
    """
    B, width = tokens_B3L.shape
    L = width // 3
    config = dataclasses.replace(config, mem_len=2 * L)
    model, variables = TransformerXL(config), {"params": params}

    def read(tokens_BL: Array, memory: Memory) -> tuple[Array, Memory]:
        return model.apply(variables, tokens_BL, memory, method="logits")  # type: ignore

    @jax.jit
    def both(tokens_B3L: Array) -> Array:
        memory = Memory.empty(config, B)
        for begin in (0, L):
            _, memory = read(tokens_B3L[:, begin : begin + L], memory)
        h_NBMD = jnp.roll(memory.h_NBMD, L, axis=2)
        swapped = dataclasses.replace(memory, h_NBMD=h_NBMD)
        kept_BLV, swapped_BLV = (
            read(tokens_B3L[:, 2 * L :], each)[0] for each in (memory, swapped)
        )
        return jnp.mean(jnp.abs(kept_BLV - swapped_BLV))

    return float(both(tokens_B3L))
