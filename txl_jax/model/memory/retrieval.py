"""A store of keys and values, from which one layer retrieves (Wu et al. 2022).

Beside the memory of another kind, the newest T tokens of a document leave their keys and
values of one layer in a store. A query of this layer retrieves the best among those
that its local attention does not see, older than its memory; a gate for each head mixes
the result with the local attention. Only contents count: retrieved keys have no
position. Keys and queries of the search are normalized, since the stored ones come from
older parameters; the local attention is that of a model without a store.

Dims: T tokens of the store.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.errors import UserError
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.top_keys import KEEP_FOUND, Candidates, retrieve
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import normal
from txl_jax.model.memory.cache import Memory
from txl_jax.model.memory.interval import count_filled, find_oldest
from txl_jax.model.memory.protocol import (
    CallMemory,
    Kept,
    LayerMemory,
    MemoryLike,
)

# The gates start almost closed: sigmoid(-2) = 0.12 of the retrieved values.
INITIAL_GATE = -2.0


@flax.struct.dataclass
class Store:
    """Normalized keys, and values, of the newest T tokens of every stream, in a ring.

    start_B: the slot of the oldest token, which the next one replaces.
    filled_B: the number of tokens that may be retrieved, the newest ones.
    """

    k_BHTA: Array
    v_BHTA: Array
    start_B: Array
    filled_B: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int) -> "Store":
        """Returns the initial store, from which nothing can be retrieved."""
        T, dtype = config.retrieval_len, config.compute_dtype
        zeros = jnp.zeros((batch_size, config.n_head, T, config.d_head), dtype)
        none_B = jnp.zeros(batch_size, jnp.int32)
        return cls(zeros, zeros, none_B, none_B)

    @jax.named_scope("store")
    def append(
        self,
        k_BLHA: Array,
        v_BLHA: Array,
        length_B: Array | None,
        first_BL: Array | None,
    ) -> "Store":
        """Returns the store after a segment; see `CallMemory.append`."""
        B, L = k_BLHA.shape[:2]
        T = self.k_BHTA.shape[2]
        if length_B is None:
            length_B = jnp.full(B, L, jnp.int32)
        place_L, end_B1 = jnp.arange(L), length_B[:, None]
        is_new_BL = (place_L < end_B1) & (place_L >= end_B1 - T)
        # Slot T does not exist: what it gets is dropped.
        slot_BL = jnp.where(is_new_BL, (self.start_B[:, None] + place_L) % T, T)

        def put(x_HTA: Array, slot_L: Array, x_LHA: Array) -> Array:
            x_HLA = jnp.swapaxes(x_LHA, 0, 1).astype(x_HTA.dtype)
            return x_HTA.at[:, slot_L].set(x_HLA, mode="drop")

        return Store(
            k_BHTA=jax.vmap(put)(self.k_BHTA, slot_BL, k_BLHA),
            v_BHTA=jax.vmap(put)(self.v_BHTA, slot_BL, v_BLHA),
            start_B=(self.start_B + length_B) % T,
            filled_B=count_filled(self.filled_B, T, length_B, first_BL),
        )


@flax.struct.dataclass
class RetrievalMemory:
    """A memory of another kind, and a store beside it."""

    local: Any  # a MemoryLike
    store: Store

    @classmethod
    def of(cls, config: ModelConfig, local: MemoryLike) -> "RetrievalMemory":
        """Returns the initial memory with an initial local one."""
        return cls(local, Store.empty(config, len(local.filled_B)))

    @property
    def mem_len(self) -> int:
        """The length M of the local memory."""
        return self.local.mem_len

    @property
    def filled_B(self) -> Array:
        """The visible slots of the local memory."""
        return self.local.filled_B

    @property
    def layers(self) -> Any:
        """The layers of the local memory; a call has those of `RetrievalCall`."""
        return self.local.layers

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> "RetrievalMemory":
        """Returns the memory after a segment, of which `kept` is (local, (k, v))."""
        kept, (k_BLHA, v_BLHA) = kept
        return RetrievalMemory(
            self.local.append(kept, length_B, first_BL),
            self.store.append(k_BLHA, v_BLHA, length_B, first_BL),
        )

    def zero(self, where_B: Array) -> "RetrievalMemory":
        """Returns the memory with local zeros, and no store, in the streams where_B."""
        filled_B = jnp.where(where_B, 0, self.store.filled_B)
        store = dataclasses.replace(self.store, filled_B=filled_B)
        return RetrievalMemory(self.local.zero(where_B), store)


@flax.struct.dataclass
class OpenStore:
    """The store during a call.

    oldest_BL: the oldest token that each query may retrieve (`top_keys.Candidates`).
    """

    store: Store
    gate_H: Array
    oldest_BL: Array
    mem_len: int = flax.struct.field(pytree_node=False)
    top_k: int = flax.struct.field(pytree_node=False)

    def mix(
        self, o_BLHA: Array, q_BLHA: Array, k_BLHA: Array, v_BLHA: Array, seen_BL: Array
    ) -> Array:
        """Returns o_BLHA of the local attention, mixed with what each query retrieves.

        seen_BL: the oldest key that the local attention sees, as in `Operands`.
        Without candidates, a query keeps its local attention.
        """
        store, T = self.store, self.store.k_BHTA.shape[2]
        stop_BL = seen_BL + T - self.mem_len
        candidates = Candidates(
            q_BLHA=normalize(q_BLHA),
            k_BLHA=k_BLHA,
            v_BLHA=v_BLHA,
            oldest_BL=self.oldest_BL,
            stop_BL=stop_BL,
            k_BHTA=store.k_BHTA,
            v_BHTA=store.v_BHTA,
            start_B=store.start_B,
        )
        far_BLHA = retrieve(candidates, self.top_k)
        any_BL11 = (stop_BL > self.oldest_BL)[..., None, None]
        share_BLH1 = jnp.where(any_BL11, jax.nn.sigmoid(self.gate_H)[:, None], 0.0)
        return ((1 - share_BLH1) * o_BLHA + share_BLH1 * far_BLHA).astype(o_BLHA.dtype)


class RetrievalLayer(NamedTuple):
    """A layer's local memory, and the store that one of the layers reads.

    is_here: whether it is this layer; None = it is. In the scan over layers every layer
    has the same store, which is not copied.
    """

    local: LayerMemory
    is_here: Array | None
    store: OpenStore

    def before(self, h_BLD: Array) -> tuple[Array, int] | None:
        """Returns the states of the local memory."""
        return self.local.before(h_BLD)

    def attend(self, own: Operands, h_BKD: Array, kernel: Kernel) -> tuple[Array, Kept]:
        """Returns (o_BLHA, (what the local memory keeps, (k_BLHA, v_BLHA)))."""
        o_BLHA, kept = self.local.attend(own, h_BKD, kernel)
        L = own.q_BLHA.shape[1]
        k_BLHA, v_BLHA = map(
            jax.lax.stop_gradient, (normalize(own.k_BKHA[:, -L:]), own.v_BKHA[:, -L:])
        )
        operands = o_BLHA, own.q_BLHA, k_BLHA, v_BLHA, own.oldest_BL
        if self.is_here is None:
            o_BLHA = self.store.mix(*operands)
        else:
            # Rematerialized: a conditional would keep the store for the backward pass
            # as its own result, and so a copy for each layer.
            @functools.partial(jax.checkpoint, policy=KEEP_FOUND)
            def mix_here(store: OpenStore, is_here: Array, *operands: Array) -> Array:
                return jax.lax.cond(is_here, store.mix, keep_local, *operands)

            o_BLHA = mix_here(self.store, self.is_here, *operands)
        return o_BLHA, (kept, (k_BLHA, v_BLHA))


def keep_local(o_BLHA: Array, *_: Array) -> Array:
    """Returns the local attention."""
    return o_BLHA


def normalize(x_BLHA: Array) -> Array:
    """Returns queries or keys with a mean square of 1 in each head (RMSNorm)."""
    x = x_BLHA.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return (x * scale).astype(x_BLHA.dtype)


class RetrievalCall(NamedTuple):
    """A `RetrievalMemory` during a call."""

    memory: RetrievalMemory
    store: OpenStore
    layer: int  # that retrieves, from 0

    @property
    def mem_len(self) -> int:
        """The length M of the local memory."""
        return self.memory.mem_len

    @property
    def layers(self) -> Any:
        """The layers' memories: stacked, or a tuple if the local ones are."""
        layers, n = self.memory.local.layers, self.layer
        if isinstance(self.memory.local, Memory):
            is_here_N = jnp.arange(len(layers.h_BMD)) == n
            return RetrievalLayer(layers, is_here_N, self.store)
        return *layers[:n], RetrievalLayer(layers[n], None, self.store), *layers[n + 1 :]

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> RetrievalMemory:
        """Returns the memory after the call."""
        if isinstance(self.memory.local, Memory):
            kept, every = kept
            own = jax.tree.map(lambda x_NBLHA: x_NBLHA[self.layer], every)
        else:
            here, own = kept[self.layer]
            kept = [*kept[: self.layer], here, *kept[self.layer + 1 :]]
        return self.memory.append((kept, own), length_B, first_BL)


def layer_axes(config: ModelConfig) -> Any:
    """Returns the axes of the layers' memories in the scan over layers."""
    return RetrievalLayer(0, 0, nn.broadcast) if config.retrieval_len else 0


def make_gate(module: nn.Module, config: ModelConfig) -> Array | None:
    """Returns the logits of the gates, a parameter of the model, or None."""
    if not config.retrieval_len:
        return None
    init = normal(0, "H", mean=INITIAL_GATE)
    gate_H: Array = module.param("retrieval_gate", init, (config.n_head,))
    return gate_H


def open_store(
    config: ModelConfig,
    memory: MemoryLike,
    gate_H: Array | None,
    first_BL: Array | None,
    L: int,
) -> CallMemory:
    """Returns the memory for a call of L tokens; it is unchanged without a store.

    Raises UserError if the config has a store and the memory has none.
    """
    if gate_H is None:
        return memory
    if not isinstance(memory, RetrievalMemory):
        raise UserError(
            f"model.retrieval_len = {config.retrieval_len} needs the memory of "
            "kinds.empty_memory; the modes attention and speed have none with a store"
        )
    T = config.retrieval_len
    oldest_BL = find_oldest(memory.store.filled_B, first_BL, T, L, reach=T + 1)
    store = OpenStore(
        memory.store, gate_H, oldest_BL, memory.mem_len, config.retrieval_top_k
    )
    return RetrievalCall(memory, store, config.retrieval_index)
