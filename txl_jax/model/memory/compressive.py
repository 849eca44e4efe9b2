"""The compressive memory (Rae et al. 2019, section 3).

C consecutive states that leave the memory become a slot of the compressed memory, whose
oldest slots are lost in turn. Attention reads [compressed; memory; segment] in this
order and counts distances in slots. Until C states can leave together, up to C - 1
states (`pending_B`) stay in the memory beside its mem_len states, so that segments may
have any length.

Dims: M slots, the Z compressed ones, C - 1 for pending states, and the memory's; C
states of a block, J blocks, P = J C states, K = M + L states.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.model.attention import Attention
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.cache import CacheLayer
from txl_jax.model.memory.interval import last_start, window
from txl_jax.model.memory.protocol import Call, CallMemory, Kept, Kind, MemoryLike


@flax.struct.dataclass
class CompressiveLayer(CacheLayer):
    """The slots of one layer; see `CompressiveMemory`."""

    pending_B: Array
    length_B: Array | None


class Compression(nn.Module):
    """Compresses the states that leave one layer's memory at a segment (f_c).

    "conv" has one matrix for each of the C states of a block. Initially their sum is
    the mean of the states.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        layer: CompressiveLayer,
        oldest_BL: Array,
        attention: Mapping[str, Any],
    ) -> tuple[Array, Array, Array]:
        """Returns (h_BLD, new_BJD, error_B); new_BJD are the new slots.

        oldest_BL: as for `Attention`, whose parameters are `attention`. error_B: see
        `CompressiveMemory`.
        """
        config, C, D = self.config, self.config.compression_rate, self.config.d_model
        h_BLD = jax.lax.stop_gradient(h_BLD)
        h_BKD = jnp.concatenate([layer.h_BMD.astype(h_BLD.dtype), h_BLD], axis=1)
        B, L = h_BLD.shape[:2]
        J = (C - 1 + L) // C
        start_B = config.compressed_len + C - 1 - layer.pending_B
        old_BPD = window(h_BKD[None], start_B, J * C)[0]
        old_BJCD = old_BPD.reshape(B, J, C, D)
        if config.compression == "mean":
            return h_BLD, old_BJCD.mean(2), jnp.zeros(B)
        if config.compression == "max":
            return h_BLD, old_BJCD.max(2), jnp.zeros(B)
        conv_CDX: Any = self.param("conv", initial_mean, (C, D, D))
        new_BJD = jnp.einsum("BJCD,CDX->BJX", old_BJCD, conv_CDX.astype(h_BLD.dtype))
        length_B = jnp.full(B, L) if layer.length_B is None else layer.length_B
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        end_J = C * jnp.arange(1, J + 1)
        complete_BJ = end_J <= (layer.pending_B + length_B)[:, None]
        oldest_B1 = jnp.take_along_axis(oldest_BL, last_B1, axis=1)
        seen_BJ = start_B[:, None] + end_J - C >= oldest_B1
        states = Reconstruction(old_BPD, new_BJD, complete_BJ & seen_BJ, length_B)
        constant = {"params": jax.lax.stop_gradient(nn.unbox(attention))}
        attend: Any = Attention(config, parent=None).apply
        result = attend(constant, h_BLD, states, oldest_BL)
        return h_BLD, jax.lax.stop_gradient(new_BJD), result[1]


def initial_mean(key: Array, shape: tuple[int, ...]) -> nn.LogicallyPartitioned:
    """Returns C identity matrices divided by C, [C, D, D]."""
    conv_CDX = jnp.broadcast_to(jnp.eye(shape[1]) / shape[0], shape)
    return nn.LogicallyPartitioned(conv_CDX, (None, "D", None))


class Reconstruction(NamedTuple):
    """Replaces a layer's memory, to compare attention to old and to new states.

    The layer's own projections and norms are used, without a term for positions. Both
    attentions read only the blocks that later queries may see, seen_BJ. Only the first
    length_B queries count; the others are padding.
    """

    old_BPD: Array
    new_BJD: Array
    seen_BJ: Array
    length_B: Array

    def before(self, h_BLD: Array) -> tuple[Array, int]:
        """Returns old and new states."""
        return jnp.concatenate([self.old_BPD, self.new_BJD], axis=1), 0

    def attend(
        self, own: Operands, h_BKD: Array, x_BKD: Array, kernel: Kernel
    ) -> tuple[Array, Array]:
        """Returns (zeros, error_B), the mean square of the difference."""
        P, J = self.old_BPD.shape[1], self.new_BJD.shape[1]
        q_BLHA = own.q_BLHA.astype(jnp.float32) / own.q_BLHA.shape[-1] ** 0.5

        def content(first: int, last: int, seen_BK: Array) -> Array:
            k_BKHA, v_BKHA = own.k_BKHA[:, first:last], own.v_BKHA[:, first:last]
            score_BHLK = jnp.einsum("BLHA,BKHA->BHLK", q_BLHA, k_BKHA)
            # Finite, because a stream may have no such block.
            score_BHLK = jnp.where(seen_BK[:, None, None], score_BHLK, -1e30)
            p_BHLK = jax.nn.softmax(score_BHLK)
            return jnp.einsum("BHLK,BKHA->BLHA", p_BHLK, v_BKHA)

        seen_BP = jnp.repeat(self.seen_BJ, P // J, axis=1)
        difference_BLHA = content(0, P, seen_BP) - content(P, P + J, self.seen_BJ)
        error_BL = jnp.mean(jnp.square(difference_BLHA), axis=(2, 3))
        is_real_BL = jnp.arange(error_BL.shape[1]) < self.length_B[:, None]
        error_B = jnp.sum(error_BL * is_real_BL, axis=1)
        error_B /= jnp.maximum(self.length_B, 1)
        error_B = jnp.where(jnp.any(self.seen_BJ, axis=1), error_B, 0)
        return jnp.zeros_like(own.q_BLHA), error_B


@flax.struct.dataclass
class CompressiveMemory:
    """The slots of every layer, oldest first: compressed ones, then states.

    h_NBMD: no gradient flows into it.
    filled_B: see `protocol.MemoryLike`. A compressed slot is visible only if all of
        its states are: none mixes two documents.
    pending_B: the number of states that have left, in a block that is not complete.
    error_B: how much attention to the slots that the last segment added differs from
        attention to their states: the mean square per feature of a head's result,
        summed over layers. Zero unless the compression learns.
    length_B: in a call, the number of real tokens; None = all.
    """

    h_NBMD: Array
    filled_B: Array
    pending_B: Array
    error_B: Array
    compressed_len: int = flax.struct.field(pytree_node=False)
    rate: int = flax.struct.field(pytree_node=False)
    length_B: Array | None = None

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int) -> "CompressiveMemory":
        """Returns the initial memory; see `cache.Memory.empty`."""
        B, Z, C = batch_size, config.compressed_len, config.compression_rate
        shape = (config.n_layer, B, config.mem_slots, config.d_model)
        return cls(
            h_NBMD=jnp.zeros(shape, config.compute_dtype),
            filled_B=jnp.zeros(B, jnp.int32),
            pending_B=jnp.zeros(B, jnp.int32),
            error_B=jnp.zeros(B),
            compressed_len=Z,
            rate=C,
        )

    @property
    def mem_len(self) -> int:
        """The number of slots."""
        return self.h_NBMD.shape[2]

    @property
    def states(self) -> int:
        """The number of states in the memory, without pending ones."""
        return self.mem_len - self.compressed_len - self.rate + 1

    @property
    def layers(self) -> CompressiveLayer:
        """The layers' memories, stacked."""
        h_NBMD = jax.lax.stop_gradient(self.h_NBMD)
        N, B = h_NBMD.shape[:2]
        pending_NB, length_NB = jax.tree.map(
            lambda x_B: jnp.broadcast_to(x_B, (N, B)), (self.pending_B, self.length_B)
        )
        return CompressiveLayer(h_NBMD, pending_NB, length_NB)

    @jax.named_scope("memory")
    def append(
        self,
        kept: tuple[Array, Array, Array],
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "CompressiveMemory":
        """Returns the memory after a segment; `kept`: the result of `Compression`."""
        h_NBLD, new_NBJD, error_NB = kept
        M, (B, L) = self.mem_len, h_NBLD.shape[1:3]
        if length_B is None:
            length_B = jnp.full(B, L, jnp.int32)
        left_B = self.pending_B + length_B
        blocks_B, pending_B = left_B // self.rate, left_B % self.rate

        def pick(
            x_NKD: Array, before: Array, after: Array, length: Array, blocks: Array
        ) -> Array:
            """Returns the slots of one stream, from [slots; segment; new slots]."""
            age_M = jnp.arange(M)[::-1]  # 0 is the newest slot
            older_M = age_M - after - blocks  # than the new slots
            index_M = jnp.where(
                age_M < after,
                M + length - 1 - age_M,
                jnp.where(older_M < 0, M + L - 1 - older_M, M - 1 - before - older_M),
            )
            return x_NKD[:, jnp.maximum(index_M, 0)]

        added_NBKD = jnp.concatenate([h_NBLD, new_NBJD], axis=2)
        added_NBKD = added_NBKD.astype(self.h_NBMD.dtype)
        h_NBKD = jnp.concatenate([self.h_NBMD, added_NBKD], axis=2)
        before_B, after_B = self.states + self.pending_B, self.states + pending_B
        pick_all = jax.vmap(pick, in_axes=(1, 0, 0, 0, 0), out_axes=1)
        h_NBMD = pick_all(h_NBKD, before_B, after_B, length_B, blocks_B)

        # The visible states and compressed slots, before blocks of states become slots.
        states_B = jnp.minimum(self.filled_B, before_B)
        slots_B = self.filled_B - states_B
        states_B = states_B + length_B
        if first_BL is not None:
            last_B = last_start(length_B, first_BL)
            states_B = jnp.minimum(states_B, length_B - last_B)
            slots_B = jnp.where(last_B < 0, slots_B, 0)
        stay_B = jnp.minimum(states_B, after_B)
        slots_B += (states_B - stay_B) // self.rate
        filled_B = stay_B + jnp.minimum(slots_B, self.compressed_len)
        return dataclasses.replace(
            self,
            h_NBMD=jax.lax.stop_gradient(h_NBMD),
            filled_B=filled_B,
            pending_B=pending_B,
            error_B=jnp.sum(error_NB, axis=0),
            length_B=None,
        )


class Compressive(Kind):
    """The compressive memory."""

    field = "compressed_len"
    restarts = False

    @property
    def losses(self) -> tuple[str, ...]:  # type: ignore[override]
        """The loss of a compression that learns."""
        return ("reconstruction_mse",) if self.config.compression == "conv" else ()

    def empty(self, batch_size: int) -> MemoryLike:
        """Returns the initial memory."""
        return CompressiveMemory.empty(self.config, batch_size)

    def open(self, memory: CompressiveMemory, call: Call) -> CallMemory:
        """Returns the memory with the number of real tokens."""
        return dataclasses.replace(memory, length_B=call.length_B)

    def keep(
        self, layer: Any, kept: Kept, h_BLD: Array, oldest_BL: Array, params: Params
    ) -> Kept:
        """Returns the layer's input and its new slots."""
        compress = Compression(self.config, name="compression")
        return compress(kept, layer, oldest_BL, params)

    def added_losses(
        self, memory: CompressiveMemory, tokens_B: Array
    ) -> dict[str, Array]:
        """Returns the sum of the error, if it is a loss."""
        return {name: jnp.sum(memory.error_B * tokens_B) for name in self.losses}
