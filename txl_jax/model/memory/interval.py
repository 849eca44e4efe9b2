"""Which slots of a memory are filled, and which keys a query sees: intervals."""

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig


def initially_filled(config: ModelConfig, batch_size: int, M: int) -> Array:
    """Returns filled_B of a cold start: 0, or M with initial_memory = "zeros"."""
    filled = M if config.initial_memory == "zeros" else 0
    return jnp.full(batch_size, filled, jnp.int32)


def window(x: Array, start_B: Array, M: int) -> Array:
    """Returns M consecutive states of each stream, from start_B on.

    Dimension 1 of x holds streams, dimension 2 states.
    """

    def cut(x: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, M, axis=1)

    return jax.vmap(cut, (1, 0), 1)(x, start_B)


def newest(x: Array, M: int, axis: int) -> Array:
    """Returns the last M states, padded with zeros in front if there are fewer."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = max(M - x.shape[axis], 0), 0
    x = jnp.pad(x, pad)
    return jax.lax.slice_in_dim(x, x.shape[axis] - M, None, axis=axis)


def last_start(length_B: Array, first_BL: Array) -> Array:
    """Returns where the last document of a segment starts; far below 0 if none does."""
    position_L = jnp.arange(first_BL.shape[1])
    starts_BL = first_BL & (position_L < length_B[:, None])
    return jnp.max(jnp.where(starts_BL, position_L, -(2**30)), axis=1)


def count_filled(
    filled_B: Array, M: int, length_B: Array, first_BL: Array | None = None
) -> Array:
    """Returns the number of visible slots after a segment with length_B real tokens."""
    filled_B = filled_B + length_B
    if first_BL is not None:
        filled_B = jnp.minimum(filled_B, length_B - last_start(length_B, first_BL))
    return jnp.minimum(filled_B, M)


def find_oldest(
    filled_B: Array,
    first_BL: Array | None,
    M: int,
    L: int,
    keys_per_query: int,
    segment_len: int = 0,
) -> Array:
    """Returns the oldest key that each query sees, int32.

    The newest is the query's own, i + M. Unfilled slots, a document that starts in the
    segment and keys_per_query (`count_keys`) exclude older keys. If the L tokens are
    several segments of segment_len tokens (0 = one), a query sees M keys before its own
    segment.
    """
    query_L = jnp.arange(L, dtype=jnp.int32)
    oldest = jnp.broadcast_to(M - filled_B[:, None], (filled_B.shape[0], L))
    if first_BL is not None:
        start_BL = jax.lax.cummax(jnp.where(first_BL, query_L + M, 0), axis=1)
        oldest = jnp.maximum(oldest, start_BL)
    # With same_length a query never sees beyond M keys: segment boundaries exclude
    # nothing more.
    if keys_per_query:
        return jnp.maximum(oldest, query_L + M + 1 - keys_per_query)
    if 0 < segment_len < L:
        oldest = jnp.maximum(oldest, query_L // segment_len * segment_len)
    return oldest


def count_keys(config: ModelConfig, M: int) -> int:
    """Returns the number of keys each query sees, its own included; 0 = all.

    With same_length it is M in the paper's PyTorch code and in Hugging Face's, and
    M + 1 in the paper's TensorFlow code and in NVIDIA's.
    """
    return M + config.same_length_self if config.same_length else 0
