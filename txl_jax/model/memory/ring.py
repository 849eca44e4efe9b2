"""Keys and values in rings, for one-token generation (see `kernels.decode`).

Dims: M memory or slots.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import decode
from txl_jax.kernels.decode import Ring, Rotate
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.interval import count_filled, window
from txl_jax.model.memory.key_values import KeyValueMemory, KeyValues
from txl_jax.model.positions import SCHEMES


class RingLayer(NamedTuple):
    """One layer's ring, the slot of its oldest token, and the memory's length."""

    ring: Ring
    slot: Array
    mem_len: int
    rotate: Rotate | None

    def before(self, h_BLD: Array) -> None:
        """There are no states to project."""

    def attend(self, own: Operands, h_BKD: Array, kernel: Kernel) -> tuple[Array, Ring]:
        """Returns (o_B1HA, the ring with the new token)."""
        k_B1HA, v_B1HA = own.k_BKHA, own.v_BKHA
        # The ring has more slots than the memory has tokens.
        oldest_B1 = own.oldest_BL + self.ring.k_BHAM.shape[3] - self.mem_len
        own = own._replace(oldest_BL=oldest_B1)
        o_B1HA = decode.attend(own, self.ring, self.slot, self.rotate)
        if self.rotate is not None:
            k_B1HA = self.rotate(k_B1HA, self.slot[None])
        return o_B1HA, decode.put(self.ring, k_B1HA, v_B1HA, self.slot, o_B1HA)


@flax.struct.dataclass
class RingMemory:
    """`KeyValueMemory` in rings, for segments of one token."""

    rings: tuple[Ring, ...]
    slot: Array  # of the oldest token, which the next one replaces
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)
    rotate: Rotate | None = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, config: ModelConfig, memory: KeyValueMemory) -> "RingMemory":
        """Converts a KeyValueMemory.

        Raises ValueError if results depend on where segments begin.
        """
        if config.recurrence == "same":
            raise ValueError(
                'model.recurrence = "same" has no memory for tokens one by one: read '
                "the tokens of a segment together"
            )
        M, slots = memory.mem_len, decode.slots(memory.mem_len)
        rotate = SCHEMES[config.position].rotate

        def in_ring(x_HBKA: Array, start_B: Array, rotate: Rotate | None) -> Array:
            x_BMHA = window(x_HBKA, start_B, M).transpose(1, 2, 0, 3)
            if rotate is not None:
                x_BMHA = rotate(x_BMHA, jnp.arange(slots - M, slots))
            x_BHAM = x_BMHA.transpose(0, 2, 3, 1)
            return jnp.pad(x_BHAM, (*[(0, 0)] * 3, (slots - M, 0)))

        def ring(layer: KeyValues) -> Ring:
            k_BHAM = in_ring(layer.k_HBKA, layer.start_B, rotate)
            v_BHAM = in_ring(layer.v_HBKA, layer.start_B, None)
            r_RHA, u_HA, w_HA, bias_HR = layer.distances(M + 1)
            r_HAR = None if r_RHA is None else jnp.moveaxis(r_RHA, 0, 2)
            return Ring(k_BHAM, v_BHAM, r_HAR, u_HA, w_HA, bias_HR)

        # The newest token is in the last slot, so the next token takes slot 0.
        slot = jnp.zeros((), jnp.int32)
        return cls(tuple(map(ring, memory.layers)), slot, memory.filled_B, M, rotate)

    @property
    def layers(self) -> tuple[RingLayer, ...]:
        """Each layer's ring."""
        return tuple(
            RingLayer(ring, self.slot, self.mem_len, self.rotate) for ring in self.rings
        )

    def append(
        self,
        kept: list[Ring],
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "RingMemory":
        """Returns the memory after one token, which the rings already contain.

        Raises ValueError for padding.
        """
        if length_B is not None:
            raise ValueError("a ring takes one real token per stream: omit length_B")
        one_B = jnp.ones_like(self.filled_B)
        return dataclasses.replace(
            self,
            rings=tuple(kept),
            slot=(self.slot + 1) % self.rings[0].k_BHAM.shape[3],
            filled_B=count_filled(self.filled_B, self.mem_len, one_B, first_BL),
        )
