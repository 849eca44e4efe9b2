"""The memory: each layer's inputs from earlier segments (section 3.2, equation 2)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig


@flax.struct.dataclass
class Memory:
    """The newest M inputs of every layer, oldest first.

    h_NBMD: the input of each layer, the embeddings for the first; no gradient flows
        into it.
    filled_B: the number of visible slots, the newest ones (int32). It counts up from a
        cold start or from the last document boundary.
    """

    h_NBMD: Array
    filled_B: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int) -> "Memory":
        """Returns the initial memory of config.mem_len tokens.

        No slot is visible; with initial_memory = "zeros" all of them are.
        """
        shape = (config.n_layer, batch_size, config.mem_len, config.d_model)
        filled = config.mem_len if config.initial_memory == "zeros" else 0
        return cls(
            h_NBMD=jnp.zeros(shape, config.compute_dtype),
            filled_B=jnp.full(batch_size, filled, jnp.int32),
        )

    @property
    def mem_len(self) -> int:
        """The length M, from the shape."""
        return self.h_NBMD.shape[2]

    def layer(self, n: int) -> Array:
        """Returns the memory of layer n, h_BMD."""
        return self.h_NBMD[n]

    @jax.named_scope("memory")
    def append(
        self,
        h_NBLD: Array,
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "Memory":
        """Returns the memory after a segment, given the layers' inputs.

        Each stream keeps its M newest real tokens. The first length_B[b] tokens of
        stream b are real (default: all); padding never enters the memory. Tokens before
        the last document start (first_BL) keep their slots but become invisible.
        """
        M = self.mem_len
        N, B, L, D = h_NBLD.shape
        if length_B is None:
            length_B = jnp.full(B, L, jnp.int32)
        h_NBLD = jax.lax.stop_gradient(h_NBLD.astype(self.h_NBMD.dtype))

        def keep() -> Array:
            h_NBKD = jnp.concatenate([self.h_NBMD, h_NBLD], axis=2)
            return window(h_NBKD, length_B, M)

        if L < M:
            h_NBMD = keep()
        else:  # copies less where no stream has padding, the usual case
            full = jnp.all(length_B == L)
            h_NBMD = jax.lax.cond(full, lambda: h_NBLD[:, :, L - M :], keep)
        return Memory(h_NBMD, count_filled(self.filled_B, M, length_B, first_BL))

    def reset(self, where_B: Array) -> "Memory":
        """Returns the memory with nothing visible in the streams where_B (bool)."""
        return dataclasses.replace(self, filled_B=jnp.where(where_B, 0, self.filled_B))

    def zero(self, where_B: Array) -> "Memory":
        """Returns the memory with visible zeros in the streams where_B (bool)."""

        def zero(h_NBMD: Array) -> Array:
            return jnp.where(where_B[:, None, None], 0, h_NBMD)

        nowhere = ~jnp.any(where_B)
        return Memory(
            h_NBMD=jax.lax.cond(nowhere, lambda h: h, zero, self.h_NBMD),
            filled_B=jnp.where(where_B, self.mem_len, self.filled_B),
        )


def window(x: Array, start_B: Array, M: int) -> Array:
    """Returns M consecutive states of each stream, from start_B on.

    Dimension 1 of x holds streams, dimension 2 states.
    """

    def cut(x: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, M, axis=1)

    return jax.vmap(cut, (1, 0), 1)(x, start_B)


def count_filled(
    filled_B: Array, M: int, length_B: Array, first_BL: Array | None = None
) -> Array:
    """Returns the number of visible slots after a segment with length_B real tokens."""
    filled_B = filled_B + length_B
    if first_BL is not None:
        position_L = jnp.arange(first_BL.shape[1])
        starts_BL = first_BL & (position_L < length_B[:, None])
        # Far in the past if no document starts in the segment.
        last_B = jnp.max(jnp.where(starts_BL, position_L, -(2**30)), axis=1)
        filled_B = jnp.minimum(filled_B, length_B - last_B)
    return jnp.minimum(filled_B, M)


def find_oldest(
    filled_B: Array, first_BL: Array | None, M: int, L: int, reach: int
) -> Array:
    """Returns the oldest key that each query sees, int32.

    The newest is the query's own, i + M. Unfilled slots, a document that starts in the
    segment and `reach` (the number of keys that a query sees, its own included, 0 =
    all) exclude older keys.
    """
    query_L = jnp.arange(L, dtype=jnp.int32)
    oldest = jnp.broadcast_to(M - filled_B[:, None], (filled_B.shape[0], L))
    if first_BL is not None:
        start_BL = jax.lax.cummax(jnp.where(first_BL, query_L + M, 0), axis=1)
        oldest = jnp.maximum(oldest, start_BL)
    if reach:
        oldest = jnp.maximum(oldest, query_L + M + 1 - reach)
    return oldest


def keys_per_query(config: ModelConfig, M: int) -> int:
    """Returns the number of keys each query sees, its own included; 0 = all.

    With same_length it is M in the paper's PyTorch code and in Hugging Face's, and
    M + 1 in the paper's TensorFlow code and in NVIDIA's.
    """
    return M + config.same_length_self if config.same_length else 0
