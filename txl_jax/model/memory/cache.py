"""The paper's memory: each layer's inputs from earlier segments (section 3.2)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.interval import (
    count_filled,
    initially_filled,
    newest,
    window,
)


@flax.struct.dataclass
class CacheLayer:
    """The newest M inputs of one layer; its keys and values are computed again."""

    h_BMD: Array

    def before(self, h_BLD: Array) -> tuple[Array, int]:
        """Returns the states, all of them constants."""
        return self.h_BMD, self.h_BMD.shape[1]

    def attend(
        self, own: Operands, h_BKD: Array, kernel: Kernel
    ) -> tuple[Array, Array]:
        """Returns (o_BLHA, the layer's input)."""
        return kernel(own), h_BKD[:, self.h_BMD.shape[1] :]


@flax.struct.dataclass
class Memory:
    """The newest M inputs of every layer, oldest first.

    h_NBMD: the input of each layer, the embeddings for the first; no gradient flows
        into it.
    filled_B: see `protocol.MemoryLike`.
    """

    h_NBMD: Array
    filled_B: Array

    @classmethod
    def empty(
        cls, config: ModelConfig, batch_size: int, mem_len: int | None = None
    ) -> "Memory":
        """Returns the initial memory of mem_len tokens (default: config.mem_len).

        No slot is visible; with initial_memory = "zeros" all of them are.
        """
        M = config.mem_len if mem_len is None else mem_len
        shape = (config.n_layer, batch_size, M, config.d_model)
        return cls(
            h_NBMD=jnp.zeros(shape, config.compute_dtype),
            filled_B=initially_filled(config, batch_size, M),
        )

    @property
    def mem_len(self) -> int:
        """The length M, from the shape."""
        return self.h_NBMD.shape[2]

    @property
    def layers(self) -> CacheLayer:
        """The layers' memories, stacked."""
        # Stopped before the scan: inside it, the backward pass would store each layer's
        # memory.
        return CacheLayer(jax.lax.stop_gradient(self.h_NBMD))

    @jax.named_scope("memory")
    def append(
        self,
        h_NBLD: Array,
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "Memory":
        """Returns the memory after a segment, given the layers' inputs."""
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

    def fit(self, M: int) -> "Memory":
        """Returns the memory with a length of M tokens, the newest ones."""
        h_NBMD = newest(self.h_NBMD, M, axis=2)
        return Memory(h_NBMD, jnp.minimum(self.filled_B, M))

    def reset(self, where_B: Array) -> "Memory":
        """Returns the memory with nothing visible in the streams where_B (bool)."""
        return dataclasses.replace(self, filled_B=jnp.where(where_B, 0, self.filled_B))
