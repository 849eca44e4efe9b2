"""What a segment's attention reads, and its probabilities, made again for every head.

They are made of the model's own queries, keys and distances by the kernel that all
others are tested against, for the whole score and for each of its four terms (section
3.3) as if it were the whole:

    a  q_i . k_j      content           c  u . k_j      bias towards some contents
    b  q_i . r_(i-j)  content and       d  w . r_(i-j)  bias towards some distances
                      distance

Dims: B streams, L targets of a segment, M memory, K = M + L keys, R distances, H heads,
A head, D model.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import xla
from txl_jax.model.attention import Attention
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import layer_norm
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.positions import Distances
from txl_jax.model.txl import TransformerXL

WHOLE = "all"  # beside a, b, c and d: their sum, which is what the model has


class Attended(NamedTuple):
    """What one layer's attention reads in a segment."""

    q_BLHA: Array
    k_BKHA: Array
    distances: Distances


def observe(
    model: TransformerXL,
    params: Any,
    memory: KeyValueMemory,
    tokens_BL: Array,
    length_B: Array,
) -> tuple[KeyValueMemory, list[Attended]]:
    """Reads a segment; returns the memory, and what each layer's attention read.

    `params` are unstacked, as the model.
    """
    inputs: list[Array] = []

    def watch(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext):  # type: ignore[no-untyped-def]
        if isinstance(context.module, Attention):
            inputs.append(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(watch):
        result: Any = model.apply(
            {"params": params}, tokens_BL, memory, length_B=length_B
        )
    after: KeyValueMemory = result[1]
    found = []
    for n, h_BLD in enumerate(inputs):
        k_HBKA = after.layers[n].k_HBKA  # of the memory and the segment, as it was read
        found.append(
            Attended(
                _queries(model.config, params[f"layers_{n}"]["attention"], h_BLD),
                k_HBKA.transpose(1, 2, 0, 3),
                memory.layers[n].position(k_HBKA.shape[2]),
            )
        )
    return after, found


def _queries(config: ModelConfig, own: Any, h_BLD: Array) -> Array:
    """Returns q_BLHA of a layer's inputs, made by the layer's own parameters."""
    if config.pre_lnorm:
        h_BLD = layer_norm(config).apply({"params": own["norm"]}, h_BLD)  # type: ignore
    q_DHA = own["qkv"][:, 0].astype(config.compute_dtype)
    return jnp.einsum("BLD,DHA->BLHA", h_BLD, q_DHA)


def terms(seen: Attended, oldest: Array) -> dict[str, Array]:
    """Returns the probabilities [H, B, L, K] of the whole score and of each term.

    A term that the position scheme lacks is left out.
    """
    q, k, (r, u, w, bias) = seen
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
    """Returns p_HLR: column d is what target i gives to the key d before it."""
    L, K = p_HLK.shape[1:]
    key_LR = jnp.arange(L)[:, None] + (K - L) - jnp.arange(R)
    return jnp.take_along_axis(p_HLK, key_LR[None], axis=2)


def tally(seen: Attended, oldest: Array) -> tuple[dict[str, Any], Array, Array]:
    """Returns what a layer's maps are made of, for one segment and one stream.

    Of each term (mean_HR, entropy_H, distance_H); of the whole the mass on the memory
    by place in the segment, memory_HL, and the probabilities p_HLR.
    """
    L, K = seen.q_BLHA.shape[1], seen.k_BKHA.shape[1]
    R = K - L
    distance_R = jnp.arange(R)
    found = {}
    whole_HLR = jnp.zeros(())
    for name, p_HBLK in terms(seen, oldest).items():
        p_HLR = by_distance(p_HBLK[:, 0], R)
        entropy_HL = -jnp.sum(jax.scipy.special.xlogy(p_HLR, p_HLR), axis=-1)
        found[name] = (
            p_HLR.mean(axis=1),
            entropy_HL.mean(axis=1),
            (p_HLR @ distance_R.astype(p_HLR.dtype)).mean(axis=1),
        )
        if name == WHOLE:
            whole_HLR = p_HLR
    in_memory_LR = distance_R > jnp.arange(L)[:, None]
    memory_HL = jnp.sum(jnp.where(in_memory_LR, whole_HLR, 0), axis=-1)
    return found, memory_HL, whole_HLR
