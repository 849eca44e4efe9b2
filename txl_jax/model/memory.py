"""The paper's memory: each layer's inputs from earlier segments (section 3.2)."""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastState, LayerWeights
from txl_jax.model.interval import Call, count_filled, initially_filled, window


class LayerMemory(NamedTuple):
    """One layer's memory, or all layers', stacked; constants for the gradient."""

    h_BMD: Array
    fast: LayerWeights | None


@flax.struct.dataclass
class Memory:
    """The newest M inputs of every layer, oldest first: what a call passes to the next.

    h_NBMD: the input of each layer, the embeddings for the first; no gradient flows
        into it.
    filled_B: the number of visible slots, the newest ones (int32). It counts up from a
        cold start or from the last document boundary.
    fast: with fast weights, the states older than M.
    """

    h_NBMD: Array
    filled_B: Array
    fast: FastState | None = None

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
            fast=FastState.empty(config, batch_size) if config.fast_weights else None,
        )

    @property
    def mem_len(self) -> int:
        """The length M, from the shape."""
        return self.h_NBMD.shape[2]

    @property
    def layers(self) -> LayerMemory:
        """The layers' memories, stacked."""
        # Stopped before the scan over layers, which removes N: inside it, the backward
        # pass would store each layer's memory.
        layers = LayerMemory(self.h_NBMD, self.fast.layers if self.fast else None)
        return jax.lax.stop_gradient(layers)

    @jax.named_scope("memory")
    def append(
        self, h_NBLD: Array, call: Call, fast: LayerWeights | None = None
    ) -> "Memory":
        """Returns the memory after a call, given the layers' inputs and fast weights.

        Each stream keeps its M newest real tokens: padding never enters the memory.
        Tokens before the last document start keep their slots but become invisible.
        """
        M, L = self.mem_len, h_NBLD.shape[2]
        h_NBLD = jax.lax.stop_gradient(h_NBLD.astype(self.h_NBMD.dtype))

        def keep() -> Array:
            h_NBKD = jnp.concatenate([self.h_NBMD, h_NBLD], axis=2)
            return window(h_NBKD, call.length_B, M)  # the last M of M + length_B

        if L < M:
            h_NBMD = keep()
        else:  # copies less where no stream has padding, the usual case
            full = jnp.all(call.length_B == L)
            h_NBMD = jax.lax.cond(full, lambda: h_NBLD[:, :, L - M :], keep)
        return dataclasses.replace(
            self,
            h_NBMD=h_NBMD,
            filled_B=count_filled(self.filled_B, M, call.length_B, call.first_BL),
            fast=self.fast.append(fast, call, M) if self.fast and fast else None,
        )

    def reset(self, where_B: Array) -> "Memory":
        """Returns the memory with nothing visible in the streams where_B (bool)."""
        filled_B = jnp.where(where_B, 0, self.filled_B)
        fast = self.fast.reset(where_B) if self.fast else None
        return dataclasses.replace(self, filled_B=filled_B, fast=fast)

    def show_zeros(self, where_B: Array) -> "Memory":
        """Returns the memory with visible zeros in the streams where_B (bool)."""
        where_B11 = where_B[:, None, None]
        h_NBMD = jax.lax.cond(
            jnp.any(where_B),
            lambda h: jnp.where(where_B11, 0, h),
            lambda h: h,
            self.h_NBMD,
        )
        filled_B = jnp.where(where_B, self.mem_len, self.filled_B)
        return dataclasses.replace(self, h_NBMD=h_NBMD, filled_B=filled_B)
