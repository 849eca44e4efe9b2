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
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels import decode
from txl_jax.kernels.decode import Ring
from txl_jax.kernels.xla import heads_first
from txl_jax.model.config import ModelConfig
from txl_jax.model.heads import key_values
from txl_jax.model.initializers import layer_norm
from txl_jax.model.memory import Memory, filled
from txl_jax.model.positions import SCHEMES, Distances, scores


def unstack(params: Any) -> Any:
    """Returns the parameters with each layer's apart, as TransformerXL(stacked=False).

    Reading a slice of stacked parameters copies it, which costs a decoder most of its
    time: unstack once, outside the loop. What stands still is also laid out as one
    token's products read it fastest: W_q, W_k and W_v as one, qkv_DJHA; W_o in two
    halves, o_PHAC, which XLA:CPU gives to two cores; and the feed-forward's second
    matrix by what it makes, [D, F].
    """

    def lay_out(layer: Any) -> Any:
        attention, feed_forward = dict(layer["attention"]), dict(layer["feed_forward"])
        qkv_JHAD = jnp.stack([attention.pop(name) for name in "qkv"])
        attention["qkv"] = jnp.moveaxis(qkv_JHAD, -1, 0)
        attention["o"] = jnp.stack(jnp.split(attention["o"], 2, axis=-1))
        kernel_FD, bias_D = (feed_forward["out"][name] for name in ("kernel", "bias"))
        feed_forward["out"] = {"kernel": kernel_FD.T, "bias": bias_D}
        return layer | {"attention": attention, "feed_forward": feed_forward}

    N = jax.tree.leaves(params["layers"])[0].shape[0]
    apart = {
        f"layers_{n}": lay_out(jax.tree.map(lambda leaf: leaf[n], params["layers"]))  # noqa: B023
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | apart


class KeyValues(NamedTuple):
    """One layer's keys and values in slots, its distances, and k, v of a zero."""

    k_HBKA: Array
    v_HBKA: Array
    distances: Distances  # r as r_HRA
    zero_HA: tuple[Array, Array]
    start_B: Array  # the slot of the oldest token

    def extend(self, k_BLHA: Array, v_BLHA: Array) -> tuple[Array, Array]:
        """Returns the keys and values of memory and segment, k_BKHA and v_BKHA."""
        M = self.k_HBKA.shape[2] - k_BLHA.shape[1]

        def extend_one(x_HBKA: Array, x_BLHA: Array) -> Array:
            x_HBMA = window(x_HBKA, self.start_B, M).astype(x_BLHA.dtype)
            x_HBLA = heads_first(x_BLHA)
            return jnp.concatenate([x_HBMA, x_HBLA], axis=2).transpose(1, 2, 0, 3)

        return extend_one(self.k_HBKA, k_BLHA), extend_one(self.v_HBKA, v_BLHA)

    def position(self, K: int) -> Distances:
        """Returns the distances that K keys have: the last rows."""
        found = self.distances
        if found.r_RHA is not None:
            found = found._replace(r_RHA=jnp.swapaxes(found.r_RHA[:, -K:], 0, 1))
        if found.bias_HR is not None:
            found = found._replace(bias_HR=found.bias_HR[:, -K:])
        return found


@flax.struct.dataclass
class KeyValueMemory:
    """The keys and values of the newest M tokens of every layer, in order of time.

    They are in K = M + L slots, as the last segment of L was read with them: the memory
    is the M slots from the number of that segment's real tokens on. So the next one
    moves them, when it puts its own behind them, and every key is written once for a
    segment; more would cost as much as the products. filled_B as in `Memory`. Goes with
    unstacked parameters.
    """

    layers: tuple[KeyValues, ...]
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, config: ModelConfig, params: Any, memory: Memory, tgt_len: int
    ) -> "KeyValueMemory":
        """Returns the memory as keys and values, for segments of tgt_len.

        `params` are unstacked.
        """
        dtype = config.compute_dtype
        B, M = memory.filled_B.shape[0], memory.mem_len
        K = M + tgt_len
        scheme = SCHEMES[config.position]
        R_RD = scheme.encoding(config, K).astype(dtype) if scheme.encoding else None

        def in_slots(x_BMHA: Array) -> Array:
            x_HBMA = heads_first(x_BMHA).astype(config.memory_dtype)
            return jnp.pad(x_HBMA, ((0, 0), (0, 0), (tgt_len, 0), (0, 0)))

        def layer(n: int) -> KeyValues:
            own = params[f"layers_{n}"]["attention"]
            k_BMHA, v_BMHA = project(config, own, memory.layer(n).astype(dtype))
            nothing_11D = jnp.zeros((1, 1, config.d_model), dtype)
            zero_k, zero_v = project(config, own, nothing_11D)
            untied = config.untie_r or scheme.untied
            biases = {
                name: (params[name][n] if untied else params[name]).astype(dtype)
                for name in scheme.biases
            }
            distances = scores(
                config, lambda name, *_: own[name].astype(dtype), R_RD, biases, K
            )
            if distances.r_RHA is not None:
                r_HRA = jnp.swapaxes(distances.r_RHA, 0, 1)
                distances = distances._replace(r_RHA=r_HRA)
            return KeyValues(
                in_slots(k_BMHA),
                in_slots(v_BMHA),
                distances,
                (zero_k[0, 0], zero_v[0, 0]),
                jnp.full(B, tgt_len, jnp.int32),
            )

        return cls(tuple(map(layer, range(config.n_layer))), memory.filled_B, M)

    def letters(self) -> "KeyValueMemory":
        """Returns what the dimensions are called, as `Memory.LETTERS`."""

        def name(layer: KeyValues) -> Any:
            r, u, w, bias = layer.distances
            distances = Distances(
                *(
                    None if x is None else PartitionSpec(*letters)
                    for x, letters in ((r, "HRA"), (u, "HA"), (w, "HA"), (bias, "HR"))
                )  # type: ignore[arg-type]
            )
            kept, zero = PartitionSpec(*"HBKA"), PartitionSpec(*"HA")
            start = PartitionSpec("B")
            return KeyValues(kept, kept, distances, (zero, zero), start)  # type: ignore

        return dataclasses.replace(
            self,
            layers=tuple(map(name, self.layers)),
            filled_B=PartitionSpec("B"),  # type: ignore[arg-type]
        )

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
                k_HBKA=heads_first(k_BKHA).astype(layer.k_HBKA.dtype),
                v_HBKA=heads_first(v_BKHA).astype(layer.v_HBKA.dtype),
                start_B=length_B,
            )
            for layer, (k_BKHA, v_BKHA) in zip(self.layers, kept, strict=True)
        )
        filled_B = filled(self.filled_B, M, length_B, first_BL)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)

    def zero(self, where_B: Array) -> "KeyValueMemory":
        """Returns the memory with visible zeros in the streams where_B (bool)."""

        def zero(layer: KeyValues) -> KeyValues:
            k_HA, v_HA = (x_HA.astype(layer.k_HBKA.dtype) for x_HA in layer.zero_HA)
            where_B11 = where_B[:, None, None]
            return layer._replace(
                k_HBKA=jnp.where(where_B11, k_HA[:, None, None], layer.k_HBKA),
                v_HBKA=jnp.where(where_B11, v_HA[:, None, None], layer.v_HBKA),
            )

        return dataclasses.replace(
            self,
            layers=tuple(map(zero, self.layers)),
            filled_B=jnp.where(where_B, self.mem_len, self.filled_B),
        )


def window(x_HBKA: Array, start_B: Array, M: int) -> Array:
    """Returns x_HBMA, M slots of each stream from its own start on."""

    def cut(x_HKA: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x_HKA, start, M, axis=1)

    return jax.vmap(cut, in_axes=(1, 0), out_axes=1)(x_HBKA, start_B)


def project(config: ModelConfig, attention: Any, h_BMD: Array) -> tuple[Array, Array]:
    """Returns what a layer's attention, of these parameters, makes of hidden states."""
    dtype = config.compute_dtype
    if config.pre_lnorm:
        norm = layer_norm(config)
        h_BMD = norm.apply({"params": attention["norm"]}, h_BMD)  # type: ignore
    _, k_HAD, v_HAD = jnp.moveaxis(attention["qkv"].astype(dtype), 0, -1)
    return key_values(h_BMD, k_HAD, v_HAD)


class RingLayer(NamedTuple):
    """One layer's ring, with what reading it needs."""

    ring: Ring
    distances: Distances
    slot: Array
    mem_len: int

    def attend(
        self, q_B1HA: Array, k_B1HA: Array, v_B1HA: Array, oldest_B: Array
    ) -> tuple[Array, Ring]:
        """Returns (o_B1HA, the ring with the token in it)."""
        # Of the memory's tokens, the oldest is not the oldest in the ring.
        oldest_B = oldest_B + self.ring.k_BHAM.shape[3] - self.mem_len
        o_B1HA = decode.attend(
            q_B1HA, k_B1HA, v_B1HA, self.ring, *self.distances, self.slot, oldest_B
        )
        return o_B1HA, decode.put(self.ring, k_B1HA, v_B1HA, self.slot, o_B1HA)


@flax.struct.dataclass
class RingMemory:
    """The same in rings, for segments of one token: see `kernels.decode`."""

    rings: tuple[Ring, ...]
    distances: tuple[Distances, ...]  # r as r_HAR
    slot: Array
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, memory: KeyValueMemory) -> "RingMemory":
        """Returns the memory in rings."""
        M = memory.mem_len
        distances = []
        for layer in memory.layers:
            found = layer.position(M + 1)
            if found.r_RHA is not None:
                found = found._replace(r_RHA=jnp.moveaxis(found.r_RHA, 0, 2))
            distances.append(found)

        def in_ring(x_HBKA: Array, layer: KeyValues) -> Array:
            x_HBMA = window(x_HBKA, layer.start_B, M)
            unused = (decode.slots(M) - M, 0)
            return jnp.pad(x_HBMA.transpose(1, 0, 3, 2), (*[(0, 0)] * 3, unused))

        # The newest token is in the last slot, and the next one's is slot 0.
        rings = tuple(
            Ring(in_ring(layer.k_HBKA, layer), in_ring(layer.v_HBKA, layer))
            for layer in memory.layers
        )
        start = jnp.zeros((), jnp.int32)
        return cls(rings, tuple(distances), start, memory.filled_B, M)

    def layer(self, n: int) -> RingLayer:
        """Returns the ring of layer n."""
        return RingLayer(self.rings[n], self.distances[n], self.slot, self.mem_len)

    def append(
        self, kept: list[Ring], length_B: None = None, first_BL: None = None
    ) -> "RingMemory":
        """Returns the memory with `kept`, the rings that have the token in them."""
        if length_B is not None or first_BL is not None:
            raise ValueError(
                "a ring takes one token of every stream, of no new document"
            )
        return dataclasses.replace(
            self,
            rings=tuple(kept),
            slot=(self.slot + 1) % self.rings[0].k_BHAM.shape[3],
            filled_B=jnp.minimum(self.filled_B + 1, self.mem_len),
        )
