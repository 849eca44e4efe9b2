"""The integer hash behind dropout masks and checkpoint checksums."""

import flax.struct
import jax.numpy as jnp
from jax import Array

STEP = 0x9E3779B9  # a counter's increment from one index to the next


@flax.struct.dataclass
class AttentionDropout:
    """Dropout of attention probabilities.

    Each keep bit is a hash of the seed and the global stream, head, query and key, so
    it depends on neither a kernel's block sizes nor the mesh.
    """

    rate: float = flax.struct.field(pytree_node=False)
    seed: Array  # uint32
    stream0: Array | int = 0  # global index of the first local stream
    head0: Array | int = 0  # global index of the first local head


def murmur3(x: Array) -> Array:
    """Scrambles uint32: the finalizer of MurmurHash3 (Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def keep_counter(rate: float, counter: Array) -> Array:
    """Returns whether each value of a counter survives dropout, bool."""
    return murmur3(counter) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def keep_index(rate: float, start: Array, index: Array) -> Array:
    """Returns whether each index survives dropout, bool; the counter begins at `start`.

    All integers are uint32.
    """
    return keep_counter(rate, start + index * jnp.uint32(STEP))


def start_BHL(dropout: AttentionDropout, B: int, H: int, L: int) -> Array:
    """Returns the start of each row's counter over keys."""
    stream_B, head_H, query_L = (jnp.arange(n, dtype=jnp.uint32) for n in (B, H, L))
    stream_B += jnp.uint32(dropout.stream0)
    head_H += jnp.uint32(dropout.head0)
    start_BH = murmur3(murmur3(dropout.seed ^ stream_B)[:, None] ^ head_H)
    return murmur3(start_BH[..., None] ^ query_L)


def keep_BHLK(dropout: AttentionDropout, shape: tuple[int, int, int, int]) -> Array:
    """Returns whether each attention probability survives dropout, bool.

    The counter of a row (stream, head, query) starts at
    h(h(h(seed ^ stream) ^ head) ^ query), where h is `murmur3`. Key j survives if
    h(start + j * 0x9E3779B9) >= rate * 2^32.
    """
    key_K = jnp.arange(shape[3], dtype=jnp.uint32)
    return keep_index(dropout.rate, start_BHL(dropout, *shape[:3])[..., None], key_K)
