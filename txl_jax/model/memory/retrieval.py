"""A store of one layer's keys and values, from which it retrieves (Wu et al. 2022).

Beside a memory of another kind, the store has the newest T tokens. A query retrieves
the best tokens that its local attention does not see, and a gate for each head mixes
the two results. Retrieved keys have no position. The search normalizes keys and queries
since stored keys come from older parameters.

Dims: T slots of the store, X = T + L candidates, J tokens that a query retrieves.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.product import float32_product
from txl_jax.kernels.sharded import (
    divides,
    over_heads,
    split_mesh,
    stream_axes,
    target_device,
)
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Layout, Params, normal
from txl_jax.model.memory.cache import Extended, ExtendedStates
from txl_jax.model.memory.interval import count_filled, find_oldest
from txl_jax.model.memory.protocol import Call, Kept, LayerMemory, MemoryLike

INITIAL_GATE = -2.0  # almost closed: sigmoid(-2) = 0.12
# The share of the best keys that the approximate search of TPUs finds on average.
RECALL = 0.95
# The scores that a device holds at once, 256 MiB in float32.
SCORES = 2**26
# The backward pass recomputes all but the search: its scores are too many to keep.
KEEP_FOUND = jax.checkpoint_policies.save_only_these_names("found")


@flax.struct.dataclass
class RetrievalMemory(Extended):
    """A local memory, and a ring of the newest T tokens: normalized keys, and values.

    start_B: the slot of the oldest token, which the next one replaces. stored_B: how
    many of the newest tokens may be retrieved.
    """

    local: Any
    k_BHTA: Array
    v_BHTA: Array
    start_B: Array
    stored_B: Array
    config: ModelConfig = flax.struct.field(pytree_node=False)
    layout: Layout = flax.struct.field(pytree_node=False)


class OpenStore(NamedTuple):
    """A `RetrievalMemory` during a call.

    time_BX: times of all candidates, counted like the local attention's keys.
    oldest_BL: the oldest time that a query may retrieve.
    """

    memory: RetrievalMemory
    gate_H: Array
    time_BX: Array
    oldest_BL: Array

    @property
    def layers(self) -> Any:
        """The local memory's layers, one of which reads the store."""
        local, config = self.memory.local, self.memory.config
        layers, n = local.layers, config.retrieval_index
        store = self._replace(memory=dataclasses.replace(self.memory, local=None))
        if self.memory.layout == "stacked":
            return RetrievalLayer(layers, jnp.arange(config.n_layer) == n, store)
        here = RetrievalLayer(layers[n], is_here=None, store=store)
        return *layers[:n], here, *layers[n + 1 :]

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> RetrievalMemory:
        """Returns the memory after the call; `kept` is of all layers."""
        memory = self.memory
        T, n = memory.k_BHTA.shape[2], memory.config.retrieval_index
        if memory.layout == "stacked":
            kept, (k_NBLHA, v_NBLHA) = kept
            k_BLHA, v_BLHA = k_NBLHA[n], v_NBLHA[n]
        else:
            local, (k_BLHA, v_BLHA) = kept[n]
            kept = [*kept[:n], local, *kept[n + 1 :]]
        B, L = k_BLHA.shape[:2]
        end_B = jnp.full(B, L, jnp.int32) if length_B is None else length_B
        i_L, end_B1 = jnp.arange(L), end_B[:, None]
        is_new_BL = (i_L < end_B1) & (i_L >= end_B1 - T)
        # Writes to slot T, which does not exist, are dropped.
        slot_BL = jnp.where(is_new_BL, (memory.start_B[:, None] + i_L) % T, T)

        def put(x_HTA: Array, slot_L: Array, x_LHA: Array) -> Array:
            x_HLA = jnp.swapaxes(x_LHA, 0, 1).astype(x_HTA.dtype)
            return x_HTA.at[:, slot_L].set(x_HLA, mode="drop")

        return dataclasses.replace(
            memory,
            local=memory.local.append(kept, length_B, first_BL),
            k_BHTA=jax.vmap(put)(memory.k_BHTA, slot_BL, normalize(k_BLHA)),
            v_BHTA=jax.vmap(put)(memory.v_BHTA, slot_BL, v_BLHA),
            start_B=(memory.start_B + end_B) % T,
            stored_B=count_filled(memory.stored_B, T, end_B, first_BL),
        )

    def mix(
        self,
        o_BLHA: Array,
        stop_BL: Array,
        q_BLHA: Array,
        k_BLHA: Array,
        v_BLHA: Array,
    ) -> Array:
        """Mixes o_BLHA, the local attention, with the attention to retrieved tokens.

        A query retrieves tokens before stop_BL; without candidates, it keeps its local
        attention. Queries, keys and values are the segment's.
        """
        k_BHXA, v_BHXA = self.memory.k_BHTA, self.memory.v_BHTA
        if q_BLHA.shape[1] > 1:  # a single token is no candidate for itself
            k_BHLA, v_BHLA = (
                jnp.swapaxes(x, 1, 2) for x in (normalize(k_BLHA), v_BLHA)
            )
            k_BHXA = jnp.concatenate([k_BHXA, k_BHLA], axis=2)
            v_BHXA = jnp.concatenate([v_BHXA, v_BHLA], axis=2)
        candidates = Candidates(
            normalize(q_BLHA),
            k_BHXA,
            v_BHXA,
            self.time_BX[:, : k_BHXA.shape[2]],
            self.oldest_BL,
            stop_BL,
        )
        far_BLHA = attend_to_best(candidates, self.memory.config.retrieval_top_k)
        has_any_BL11 = (stop_BL > self.oldest_BL)[..., None, None]
        gate_BLH1 = has_any_BL11 * jax.nn.sigmoid(self.gate_H)[:, None]
        return ((1 - gate_BLH1) * o_BLHA + gate_BLH1 * far_BLHA).astype(o_BLHA.dtype)


class RetrievalLayer(NamedTuple):
    """A layer of the local memory, and the store.

    is_here: whether this layer reads the store; None = it does. The scan over layers
    gives every layer the same store, which is not copied.
    """

    local: LayerMemory
    is_here: Array | None
    store: OpenStore

    def before(self, h_BLD: Array) -> tuple[Array, int] | None:
        """Returns the states of the local memory."""
        return self.local.before(h_BLD)

    def attend(
        self, own: Operands, h_BKD: Array, x_BKD: Array, kernel: Kernel
    ) -> tuple[Array, Kept]:
        """Returns (o_BLHA, (what the local memory keeps, the segment's (k, v)))."""
        o_BLHA, kept = self.local.attend(own, h_BKD, x_BKD, kernel)
        L = own.q_BLHA.shape[1]
        k_BLHA = jax.lax.stop_gradient(own.k_BKHA[:, -L:])
        v_BLHA = jax.lax.stop_gradient(own.v_BKHA[:, -L:])
        kept = kept, (k_BLHA, v_BLHA)
        stop_BL, q_BLHA = own.oldest_BL, own.q_BLHA
        if self.is_here is None:
            return self.store.mix(o_BLHA, stop_BL, q_BLHA, k_BLHA, v_BLHA), kept

        # Without this, the conditional would keep one store for each layer's backward
        # pass, as one of its results.
        @functools.partial(jax.checkpoint, policy=KEEP_FOUND)
        def mix_here(store: OpenStore, is_here: Array, *operands: Array) -> Array:
            return jax.lax.cond(is_here, store.mix, lambda o, *_: o, *operands)

        o_BLHA = mix_here(
            self.store, self.is_here, o_BLHA, stop_BL, q_BLHA, k_BLHA, v_BLHA
        )
        return o_BLHA, kept


class Candidates(NamedTuple):
    """Queries and their candidates: the keys with oldest <= time < stop."""

    q_BLHA: Array
    k_BHXA: Array
    v_BHXA: Array
    time_BX: Array  # int32, as the next two
    oldest_BL: Array
    stop_BL: Array


def attend_to_best(candidates: Candidates, top_k: int) -> Array:
    """Returns o_BLHA, the attention of each query to its top_k best keys.

    It is 0 for a query without candidates. The search is approximate on TPUs (RECALL)
    and exact elsewhere. On a mesh, each device computes its own streams and heads.
    """
    attend = functools.partial(_attend_to_best, top_k=top_k)
    B, _, H, _ = candidates.q_BLHA.shape
    mesh = split_mesh(candidates.q_BLHA)
    if mesh is None or not divides(mesh, B, H):
        return attend(candidates)
    return over_heads(attend, candidates, mesh, stream_axes(mesh, B))


def _attend_to_best(candidates: Candidates, top_k: int) -> Array:
    q_BLHA, k_BHXA, v_BHXA, time_BX, oldest_BL, stop_BL = candidates
    B, H, X, A = k_BHXA.shape
    find = jax.lax.top_k
    if target_device().device_kind.startswith("TPU"):
        find = functools.partial(jax.lax.approx_max_k, recall_target=RECALL)
    take = jax.vmap(jax.vmap(lambda x_XA, found_J: x_XA[found_J]))

    def attend_one(q_BHA: Array, oldest_B: Array, stop_B: Array) -> Array:
        seen_BX = (time_BX >= oldest_B[:, None]) & (time_BX < stop_B[:, None])
        score_BHX = float32_product(
            "BHA,BHXA->BHX", jax.lax.stop_gradient(q_BHA), k_BHXA
        )
        score_BHX = jnp.where(seen_BX[:, None], score_BHX, -jnp.inf)
        best_BHJ, found_BHJ = find(score_BHX, min(top_k, X))
        found_BHJ = checkpoint_name(found_BHJ, "found")
        seen_BHJ = checkpoint_name(best_BHJ > -jnp.inf, "found")
        k_BHJA, v_BHJA = take(k_BHXA, found_BHJ), take(v_BHXA, found_BHJ)
        score_BHJ = float32_product("BHA,BHJA->BHJ", q_BHA, k_BHJA) / math.sqrt(A)
        p_BHJ = jax.nn.softmax(score_BHJ, axis=-1, where=seen_BHJ)
        return float32_product("BHJ,BHJA->BHA", p_BHJ.astype(v_BHJA.dtype), v_BHJA)

    o_LBHA = jax.lax.map(
        lambda query: jax.checkpoint(attend_one, policy=KEEP_FOUND)(*query),
        tuple(jnp.swapaxes(x_BL, 0, 1) for x_BL in (q_BLHA, oldest_BL, stop_BL)),
        batch_size=max(SCORES // (B * H * X), 1),
    )
    return jnp.swapaxes(o_LBHA, 0, 1).astype(q_BLHA.dtype)


def normalize(x_BLHA: Array) -> Array:
    """Returns queries or keys with a mean square of 1 (RMSNorm without a scale)."""
    x = x_BLHA.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(x_BLHA.dtype)


class Retrieval(ExtendedStates):
    """The paper's memory, and a store that one layer reads."""

    field = "retrieval_len"
    layer_axes = RetrievalLayer(0, 0, nn.broadcast)  # type: ignore[arg-type]

    def extend(self, local: MemoryLike, layout: Layout) -> RetrievalMemory:
        """Returns a local memory and an empty store."""
        config, B = self.config, len(local.filled_B)
        shape = (B, config.n_head, config.retrieval_len, config.d_head)
        k_BHTA, none_B = jnp.zeros(shape, config.compute_dtype), jnp.zeros(B, jnp.int32)
        return RetrievalMemory(local, k_BHTA, k_BHTA, none_B, none_B, config, layout)

    def one_token(self, params: Params, memory: RetrievalMemory) -> MemoryLike:
        """Returns the memory with rings of keys and values."""
        local = super().one_token(params, memory.local)
        return dataclasses.replace(memory, local=local)

    def make_parameter(self, module: nn.Module) -> Array:
        """Returns the logits of the gates."""
        init = normal(0, "H", mean=INITIAL_GATE)
        gate_H: Array = module.param("retrieval_gate", init, (self.config.n_head,))
        return gate_H

    def open(self, memory: RetrievalMemory, call: Call) -> OpenStore:
        """Returns the memory as a call reads it, with the gates."""
        L, first_BL, _, gate_H = call
        T, M, start_B = memory.k_BHTA.shape[2], memory.mem_len, memory.start_B
        time_BT = (jnp.arange(T) - start_B[:, None]) % T + M - T
        time_BL = jnp.broadcast_to(M + jnp.arange(L), (len(start_B), L))
        oldest_BL = find_oldest(memory.stored_B, first_BL, T, L, T + 1) + M - T
        time_BX = jnp.concatenate([time_BT, time_BL], axis=1)
        return OpenStore(memory, gate_H, time_BX, oldest_BL)
