"""Recomputes the attention probabilities of every head, for the score and its terms.

The reference kernel computes them from the model's queries, keys and distances: for the
whole score, and for each of its four terms (section 3.3) as if it were the whole score.

    a  q_i . k_j      content           c  u . k_j      bias towards some contents
    b  q_i . r_(i-j)  content and       d  w . r_(i-j)  bias towards some distances
                      distance

Dims: B streams, L targets of a segment, M memory, K = M + L keys, R distances, N
layers, H heads, A head, D model.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.evaluate import reader
from txl_jax.evaluate.reader import Traced
from txl_jax.kernels import xla
from txl_jax.model.config import ModelConfig
from txl_jax.model.decoder import DecoderAttention
from txl_jax.model.initializers import layer_norm
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import oldest_BL, reach
from txl_jax.model.positions import Distances
from txl_jax.model.txl import TransformerXL

WHOLE = "all"  # the sum of the terms a, b, c and d: the model's score


class Attended(NamedTuple):
    """Inputs of a layer's attention to a segment; the fields may be stacked [N, ..]."""

    q_BLHA: Array
    k_BKHA: Array
    distances: Distances


class Tally(NamedTuple):
    """One segment's contribution to the maps of a layer, for one stream."""

    mean_HR: dict[str, Array]  # by term, over targets
    entropy_H: dict[str, Array]  # in nats
    distance_H: dict[str, Array]  # in tokens
    memory_HL: Array  # share of attention on the memory, by place in the segment
    whole_HLR: Array


def observe(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Attended]:
    """Reads a segment; returns the memory and the inputs of all layers' attention."""
    inputs: list[Array] = []

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, DecoderAttention):
            inputs.append(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        after, _ = reader.hidden(model, memory, segment)
    layers = []
    for n, h_BLD in enumerate(inputs):
        k_HBKA = after.layers[n].k_HBKA  # of the memory and the segment
        params = model.variables["params"][f"layers_{n}"]["attention"]
        layers.append(
            Attended(
                _project_queries(model.config, params, h_BLD),
                k_HBKA.transpose(1, 2, 0, 3),
                memory.layers[n].distances(k_HBKA.shape[2]),
            )
        )
    return after, jax.tree.map(lambda *x: jnp.stack(x), *layers)


def _project_queries(config: ModelConfig, params: Any, h_BLD: Array) -> Array:
    """Returns the queries of one layer; `params` are its attention's."""
    if config.pre_lnorm:
        h_BLD = layer_norm(config).apply({"params": params["norm"]}, h_BLD)  # type: ignore
    q_DHA = params["qkv"][:, 0].astype(config.compute_dtype)
    return jnp.einsum("BLD,DHA->BLHA", h_BLD, q_DHA)


def terms(attended: Attended, oldest: Array) -> dict[str, Array]:
    """Returns the probabilities [H, B, L, K] of the whole score and of each term.

    Terms that the position scheme lacks are omitted.
    """
    q, k, (r, u, w, bias) = attended
    no_q, no_k = jnp.zeros_like(q), jnp.zeros_like(k)
    parts: dict[str, tuple[Any, ...]] = {
        WHOLE: (q, k, r, u, w, bias, oldest),
        "a": (q, k, None, None, None, None, oldest),
    }
    if r is not None:
        parts["b"] = (q, no_k, r, None, None, None, oldest)
    if u is not None:
        parts["c"] = (no_q, k, None, u, None, None, oldest)
    if r is not None and (w is not None or bias is not None):
        parts["d"] = (no_q, no_k, r, None, w, bias, oldest)
    return {name: xla.probabilities(*part) for name, part in parts.items()}


def by_distance(p_HLK: Array, R: int) -> Array:
    """Returns p_HLR: column d is a target's attention to the key d tokens before it."""
    L, K = p_HLK.shape[1:]
    key_LR = jnp.arange(L)[:, None] + (K - L) - jnp.arange(R)
    return jnp.take_along_axis(p_HLK, key_LR[None], axis=2)


def tally(oldest: Array, attended: Attended) -> Tally:
    """Returns the tally of one layer, for one segment of one stream."""
    L, K = attended.q_BLHA.shape[1], attended.k_BKHA.shape[1]
    distance_R = jnp.arange(K - L)
    p_HLR = {
        name: by_distance(p_HBLK[:, 0], K - L)
        for name, p_HBLK in terms(attended, oldest).items()
    }
    entropy_HL = jax.tree.map(
        lambda p: -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1), p_HLR
    )
    distance_HL = jax.tree.map(lambda p: p @ distance_R.astype(p.dtype), p_HLR)
    mean_HR, entropy_H, distance_H = (
        jax.tree.map(lambda x: x.mean(axis=1), each)
        for each in (p_HLR, entropy_HL, distance_HL)
    )
    in_memory_LR = distance_R > jnp.arange(L)[:, None]
    memory_HL = jnp.sum(jnp.where(in_memory_LR, p_HLR[WHOLE], 0), axis=-1)
    return Tally(mean_HR, entropy_H, distance_H, memory_HL, p_HLR[WHOLE])


def tally_layers(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Tally]:
    """Returns (memory, tallies of all layers [N, ..]) of one segment."""
    after, attended = observe(model, memory, segment)
    L, M = segment.inputs_SBL.shape[1], memory.mem_len
    oldest = oldest_BL(memory.filled_B, None, M, L, reach(model.config, M))
    return after, jax.lax.map(functools.partial(tally, oldest), attended)
