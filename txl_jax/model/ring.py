"""Keys and values in rings, for one-token generation.

The new token replaces the oldest, so a step writes one row and never copies the memory.
Distances from the new token wrap around the ring: a roll of [B, H, M] numbers turns
scores by distance into scores by slot.

Dims: M slots, more than the memory has tokens; in `RingMemory.of` also its tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Operands
from txl_jax.kernels.product import float32_product
from txl_jax.kernels.xla import MASKED, with_bias
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastState, LayerWeights
from txl_jax.model.interval import Call, count_filled, window
from txl_jax.model.key_values import KeyValueMemory, KeyValues
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
from txl_jax.model.positions import SCHEMES

# Rotates queries or keys by position: (x_BXHA, position_X) -> x_BXHA.
Rotate = Callable[[Array, Array], Array]


class Ring(NamedTuple):
    """One layer's keys and values by slot, and its distances (`kernels.operands`).

    Slots are innermost, so that both matrix-vector products read contiguous memory,
    which is 1.4 times as fast on two cores as with A innermost. With rotary positions,
    keys are rotated by their slots.
    """

    k_BHAM: Array
    v_BHAM: Array
    r_HAR: Array | None
    u_HA: Array | None
    w_HA: Array | None
    bias_HR: Array | None


def attend(own: Operands, ring: Ring, slot: Array, rotate: Rotate | None) -> Array:
    """Returns o_B1HA, the attention of a token over itself and the visible slots.

    own: the token's operands; the ring has the position terms. slot: of the oldest key,
    number 0 in time; keys from number oldest on are visible. rotate: the position
    scheme's; neither query nor key is rotated yet. Scores are defined in
    `xla.rel_attention`.
    """
    q_B1HA, k_B1HA, v_B1HA, _, oldest_B1, _ = own
    k_BHA, v_BHA = k_B1HA[:, 0], v_B1HA[:, 0]
    A, M = ring.k_BHAM.shape[2:]
    content_BHA = with_bias(q_B1HA, ring.u_HA)[:, 0]
    # The token's own key is handled separately: writing it first would copy the ring.
    if rotate is None:
        score_BHM = float32_product("BHA,BHAM->BHM", content_BHA, ring.k_BHAM)
    else:
        # The distance to a key in an earlier slot is the difference of the slots; the
        # other keys are one turn of the ring older.
        near_BHM, far_BHM = (
            float32_product(
                "BHA,BHAM->BHM", rotate(q_B1HA, place[None])[:, 0], ring.k_BHAM
            )
            for place in (slot, slot + M)
        )
        score_BHM = jnp.where(jnp.arange(M) < slot, near_BHM, far_BHM)
    own_BH = float32_product("BHA,BHA->BH", content_BHA, k_BHA)
    if ring.r_HAR is not None or ring.bias_HR is not None:
        position_BHR: Array = jnp.zeros((1, 1, 1))
        if ring.r_HAR is not None:
            position_BHA = with_bias(q_B1HA, ring.w_HA)[:, 0]
            position_BHR = float32_product("BHA,HAR->BHR", position_BHA, ring.r_HAR)
        if ring.bias_HR is not None:
            position_BHR += ring.bias_HR.astype(jnp.float32)
        own_BH += position_BHR[..., -1]
        missing = max(M + 1 - position_BHR.shape[-1], 0)
        far = ((0, 0), (0, 0), (missing, 0))
        position_BHM = jnp.pad(position_BHR, far, "edge")[..., -M - 1 : -1]
        # In the order of time: the oldest key, at distance M, is in `slot`.
        score_BHM += jnp.roll(position_BHM, slot, axis=-1)
    order_M = (jnp.arange(M) - slot) % M  # in time, from 0 for the oldest
    visible_B1M = (order_M >= oldest_B1)[:, None]
    score_BHM = jnp.where(visible_B1M, score_BHM, MASKED) * A**-0.5
    own_BH *= A**-0.5
    # The softmax is split into steps: in one expression, XLA:CPU takes 43 instead of 11
    # microseconds for 8 x 544 scores.
    highest_BH = jnp.maximum(jnp.max(score_BHM, axis=-1), own_BH)
    weight_BHM = jnp.exp(score_BHM - highest_BH[..., None])
    own_weight_BH = jnp.exp(own_BH - highest_BH)
    total_BH = jnp.sum(weight_BHM, axis=-1) + own_weight_BH
    o_BHA = float32_product(
        "BHM,BHAM->BHA", weight_BHM.astype(v_BHA.dtype), ring.v_BHAM
    )
    o_BHA += own_weight_BH[..., None] * v_BHA
    return (o_BHA / total_BH[..., None]).astype(v_BHA.dtype)[:, None]


class RingLayer(NamedTuple):
    """One layer's ring, the slot of its oldest token, and the memory's length."""

    ring: Ring
    slot: Array
    mem_len: int
    rotate: Rotate | None

    def attend(self, own: Operands) -> tuple[Array, Ring]:
        """Returns (o_B1HA, the ring with the new token)."""
        k_B1HA, v_B1HA = own.k_BKHA, own.v_BKHA
        # The ring has more slots than the memory has tokens.
        oldest_B1 = own.oldest_BL + self.ring.k_BHAM.shape[3] - self.mem_len
        own = own._replace(oldest_BL=oldest_B1)
        o_B1HA = attend(own, self.ring, self.slot, self.rotate)
        if self.rotate is not None:
            k_B1HA = self.rotate(k_B1HA, self.slot[None])

        def put(x_BHAM: Array, x_B1HA: Array) -> Array:
            # Adding 0 * o orders the write after the read. Without it XLA:CPU copies
            # the ring: 48 instead of 75 tokens/s at M = 2100.
            x_BHA1 = jnp.moveaxis(x_B1HA + 0 * o_B1HA, 1, 3).astype(x_BHAM.dtype)
            return jax.lax.dynamic_update_slice_in_dim(x_BHAM, x_BHA1, self.slot, 3)

        k_BHAM, v_BHAM = put(self.ring.k_BHAM, k_B1HA), put(self.ring.v_BHAM, v_B1HA)
        return o_B1HA, self.ring._replace(k_BHAM=k_BHAM, v_BHAM=v_BHAM)

    def left(self, new: Ring) -> tuple[Array, Array]:
        """Returns key and value of the state that leaves, not rotated.

        new: the ring that `attend` returned.
        """
        slot = (self.slot - self.mem_len) % new.k_BHAM.shape[3]

        def take(x_BHAM: Array) -> Array:
            x_BHA1 = jax.lax.dynamic_slice_in_dim(x_BHAM, slot, 1, axis=3)
            return jnp.moveaxis(x_BHA1, 3, 1)

        k_B1HA, v_B1HA = take(new.k_BHAM), take(new.v_BHAM)
        if self.rotate is not None:
            k_B1HA = self.rotate(k_B1HA, -slot[None])
        return k_B1HA, v_B1HA


@flax.struct.dataclass
class RingMemory:
    """`KeyValueMemory` in rings, for segments of one token."""

    rings: tuple[Ring, ...]
    slot: Array  # the oldest token's slot, which the next token takes
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)
    rotate: Rotate | None = flax.struct.field(pytree_node=False)
    fast: FastState | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, params: Params, memory: Memory | KeyValueMemory
    ) -> "RingMemory":
        """Returns a memory in rings; `params` are laid out (`fixed.lay_out`)."""
        if isinstance(memory, Memory):
            memory = KeyValueMemory.of(config, params, memory, tgt_len=1)
        M = memory.mem_len
        # XLA:CPU computes a head's product of A x M = 64 x 512 on one core and larger
        # ones on all cores: 544 slots take 0.7 of the time of 512.
        slots = (M // 32 + 1) * 32
        rotate = SCHEMES[config.position].rotate

        def in_ring(x_HBKA: Array, start_B: Array, rotate: Rotate | None) -> Array:
            x_BMHA = window(x_HBKA, start_B, M).transpose(1, 2, 0, 3)
            if rotate is not None:
                x_BMHA = rotate(x_BMHA, jnp.arange(slots - M, slots))
            x_BHAM = x_BMHA.transpose(0, 2, 3, 1)
            return jnp.pad(x_BHAM, (*[(0, 0)] * 3, (slots - M, 0)))

        def ring(layer: KeyValues) -> Ring:
            k_BHAM = in_ring(layer.k_HBKA, layer.start_B, rotate)
            v_BHAM = in_ring(layer.v_HBKA, layer.start_B, rotate=None)
            r_RHA, u_HA, w_HA, bias_HR = layer.distances(M + 1)
            r_HAR = None if r_RHA is None else jnp.moveaxis(r_RHA, 0, 2)
            return Ring(k_BHAM, v_BHAM, r_HAR, u_HA, w_HA, bias_HR)

        # The newest token is in the last slot, so the next token takes slot 0.
        slot = jnp.zeros((), jnp.int32)
        rings = tuple(map(ring, memory.layers))
        return cls(rings, slot, memory.filled_B, M, rotate, memory.fast)

    @property
    def layers(self) -> tuple[RingLayer, ...]:
        """Each layer's ring."""
        return tuple(
            RingLayer(ring, self.slot, self.mem_len, self.rotate) for ring in self.rings
        )

    def append(
        self, rings: list[Ring], call: Call, fast: LayerWeights | None
    ) -> "RingMemory":
        """Returns the memory after one token, which the rings already contain."""
        M = self.mem_len
        return dataclasses.replace(
            self,
            rings=tuple(rings),
            slot=(self.slot + 1) % self.rings[0].k_BHAM.shape[3],
            filled_B=count_filled(self.filled_B, M, call.length_B, call.first_BL),
            fast=self.fast.append(fast, call, M) if self.fast and fast else None,
        )

    def show_zeros(self, where_B: Array) -> "RingMemory":
        """Raises ValueError: rings do not know the keys of zero states."""
        raise ValueError('with initial_memory = "zeros", a ring takes no first_BL')
