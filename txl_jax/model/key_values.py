"""The memory as keys and values, legal while the parameters stand still.

Evaluation and generation read with parameters that do not change. What a layer makes
of its memory, keys and values, then stays as it is: it is made once, where training
makes it anew for every segment. So are the projected distances.

Two forms: `KeyValueMemory` in order of time, for segments, and `RingMemory`, for one
token after the other. Results are those of `Memory`.

Dims: N layers, B streams, M memory, L segment, K = M + L, R distances, D model, H
heads, A head.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels import decode
from txl_jax.kernels.decode import Ring
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import layer_norm
from txl_jax.model.memory import Memory, filled, newest
from txl_jax.model.positions import SCHEMES, Distances, scores


def unstack(params: Any) -> Any:
    """Returns the parameters with each layer's apart, as TransformerXL(stacked=False).

    Reading a slice of stacked parameters copies it, which costs a decoder most of its
    time: unstack once, outside the loop.
    """
    N = jax.tree.leaves(params["layers"])[0].shape[0]
    apart = {
        f"layers_{n}": jax.tree.map(lambda leaf: leaf[n], params["layers"])  # noqa: B023
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | apart


def key_values(h_BKD: Array, k_DHA: Array, v_DHA: Array) -> tuple[Array, Array]:
    """Returns keys and values of hidden states, normalised if they are to be."""
    k_BKHA = jnp.einsum("BKD,DHA->BKHA", h_BKD, k_DHA)
    return k_BKHA, jnp.einsum("BKD,DHA->BKHA", h_BKD, v_DHA)


class KeyValues(NamedTuple):
    """One layer's keys and values, oldest first, its distances, and k, v of a zero."""

    k_BMHA: Array
    v_BMHA: Array
    distances: Distances
    zero_HA: tuple[Array, Array]

    def extend(self, k_BLHA: Array, v_BLHA: Array) -> tuple[Array, Array]:
        """Returns the keys and values of memory and segment."""
        k_BKHA = jnp.concatenate([self.k_BMHA.astype(k_BLHA.dtype), k_BLHA], axis=1)
        return k_BKHA, jnp.concatenate(
            [self.v_BMHA.astype(v_BLHA.dtype), v_BLHA], axis=1
        )

    def position(self, K: int) -> Distances:
        """Returns the distances that K keys have: the last rows."""
        found = self.distances
        if found.r_RHA is not None:
            found = found._replace(r_RHA=found.r_RHA[-K:])
        if found.bias_HR is not None:
            found = found._replace(bias_HR=found.bias_HR[:, -K:])
        return found


@flax.struct.dataclass
class KeyValueMemory:
    """The keys and values of the newest M tokens of every layer, in order of time.

    filled_B as in `Memory`. Goes with unstacked parameters.
    """

    layers: tuple[KeyValues, ...]
    filled_B: Array

    @classmethod
    def of(
        cls, config: ModelConfig, params: Any, memory: Memory, tgt_len: int
    ) -> "KeyValueMemory":
        """Returns the memory as keys and values, for segments of tgt_len at most.

        `params` are unstacked.
        """
        dtype = config.compute_dtype
        K = memory.mem_len + tgt_len
        scheme = SCHEMES[config.position]
        R_RD = scheme.encoding(config, K).astype(dtype) if scheme.encoding else None

        def layer(n: int) -> KeyValues:
            own = params[f"layers_{n}"]["attention"]
            project = functools.partial(_project, config, own)
            k_BMHA, v_BMHA = project(memory.layer(n).astype(dtype))
            zero_k, zero_v = project(jnp.zeros((1, 1, config.d_model), dtype))
            untied = config.untie_r or scheme.untied
            biases = {
                name: (params[name][n] if untied else params[name]).astype(dtype)
                for name in scheme.biases
            }
            distances = scores(
                config, lambda name, *_: own[name].astype(dtype), R_RD, biases, K
            )
            return KeyValues(
                k_BMHA.astype(config.memory_dtype),
                v_BMHA.astype(config.memory_dtype),
                distances,
                (zero_k[0, 0], zero_v[0, 0]),
            )

        return cls(tuple(map(layer, range(config.n_layer))), memory.filled_B)

    def letters(self) -> "KeyValueMemory":
        """Returns what the dimensions are called, as `Memory.LETTERS`."""

        def name(layer: KeyValues) -> Any:
            r, u, w, bias = layer.distances
            distances = Distances(
                *(
                    None if x is None else PartitionSpec(*letters)
                    for x, letters in ((r, "RHA"), (u, "HA"), (w, "HA"), (bias, "HR"))
                )  # type: ignore[arg-type]
            )
            kept, zero = PartitionSpec(*"BMHA"), PartitionSpec(*"HA")
            return KeyValues(kept, kept, distances, (zero, zero))  # type: ignore

        return KeyValueMemory(tuple(map(name, self.layers)), PartitionSpec("B"))  # type: ignore

    @property
    def mem_len(self) -> int:
        """M, read from the shape."""
        return self.layers[0].k_BMHA.shape[1]

    def layer(self, n: int) -> KeyValues:
        """Returns the memory of layer n."""
        return self.layers[n]

    def append(
        self,
        kept: list[tuple[Array, Array]],
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "KeyValueMemory":
        """Returns the memory after a segment, of which `kept` has (k, v) [B, K, H, A].

        As `Memory.append`: each stream keeps its M newest real tokens.
        """
        M = self.mem_len
        B, K = kept[0][0].shape[:2]
        if length_B is None:
            length_B = jnp.full(B, K - M, jnp.int32)
        layers = tuple(
            layer._replace(
                k_BMHA=newest(k_BKHA, length_B, M).astype(layer.k_BMHA.dtype),
                v_BMHA=newest(v_BKHA, length_B, M).astype(layer.v_BMHA.dtype),
            )
            for layer, (k_BKHA, v_BKHA) in zip(self.layers, kept, strict=True)
        )
        return KeyValueMemory(layers, filled(self.filled_B, M, length_B, first_BL))

    def zero(self, where_B: Array) -> "KeyValueMemory":
        """Returns the memory with visible zeros in the streams where_B (bool)."""
        where_B111 = where_B[:, None, None, None]

        def zero(layer: KeyValues) -> KeyValues:
            k_HA, v_HA = (x_HA.astype(layer.k_BMHA.dtype) for x_HA in layer.zero_HA)
            return layer._replace(
                k_BMHA=jnp.where(where_B111, k_HA, layer.k_BMHA),
                v_BMHA=jnp.where(where_B111, v_HA, layer.v_BMHA),
            )

        filled_B = jnp.where(where_B, self.mem_len, self.filled_B)
        return KeyValueMemory(tuple(map(zero, self.layers)), filled_B)


def _project(config: ModelConfig, attention: Any, h_BMD: Array) -> tuple[Array, Array]:
    """Returns what a layer's attention, of these parameters, makes of hidden states."""
    dtype = config.compute_dtype
    if config.pre_lnorm:
        norm = layer_norm(config)
        h_BMD = norm.apply({"params": attention["norm"]}, h_BMD)  # type: ignore
    return key_values(h_BMD, attention["k"].astype(dtype), attention["v"].astype(dtype))


class RingLayer(NamedTuple):
    """One layer's ring, with what reading it needs."""

    ring: Ring
    distances: Distances
    slot: Array

    def attend(
        self, q_B1HA: Array, k_B1HA: Array, v_B1HA: Array, oldest_B: Array
    ) -> tuple[Array, Ring]:
        """Returns (o_B1HA, the ring with the token in it)."""
        o_B1HA = decode.attend(
            q_B1HA, k_B1HA, v_B1HA, self.ring, *self.distances, self.slot, oldest_B
        )
        return o_B1HA, decode.put(self.ring, k_B1HA, v_B1HA, self.slot, o_B1HA)


@flax.struct.dataclass
class RingMemory:
    """The same in rings, for segments of one token: see `kernels.decode`."""

    rings: tuple[Ring, ...]
    distances: tuple[Distances, ...]  # r as r_HRA
    slot: Array
    filled_B: Array

    @classmethod
    def of(cls, memory: KeyValueMemory) -> "RingMemory":
        """Returns the memory in rings."""
        distances = []
        for layer in memory.layers:
            found = layer.position(memory.mem_len + 1)
            if found.r_RHA is not None:
                found = found._replace(r_RHA=jnp.swapaxes(found.r_RHA, 0, 1))
            distances.append(found)
        rings = tuple(decode.make_ring(x.k_BMHA, x.v_BMHA) for x in memory.layers)
        return cls(rings, tuple(distances), jnp.zeros((), jnp.int32), memory.filled_B)

    @property
    def mem_len(self) -> int:
        """M, read from the shape."""
        return self.rings[0].k_BHMA.shape[2]

    def layer(self, n: int) -> RingLayer:
        """Returns the ring of layer n."""
        return RingLayer(self.rings[n], self.distances[n], self.slot)

    def append(
        self, kept: list[Ring], length_B: None = None, first_BL: None = None
    ) -> "RingMemory":
        """Returns the memory with `kept`, the rings that have the token in them."""
        if length_B is not None or first_BL is not None:
            raise ValueError(
                "a ring takes one token of every stream, of no new document"
            )
        M = self.mem_len
        return dataclasses.replace(
            self,
            rings=tuple(kept),
            slot=(self.slot + 1) % max(M, 1),
            filled_B=jnp.minimum(self.filled_B + 1, M),
        )
