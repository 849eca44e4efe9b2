"""The memory as keys and values, for evaluation and generation.

With fixed parameters, a token's keys and values and the projected distances never
change. They are computed once, whereas training projects the memory again for every
segment. Results equal those of `Memory`.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import PositionTerms
from txl_jax.kernels.xla import heads_first
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import feature_norm, head_norm
from txl_jax.model.memory import Memory, count_filled, window
from txl_jax.model.positions import SCHEMES, position_terms


class KeyValues(NamedTuple):
    """One layer's keys and values, and its distances (`kernels.xla.rel_attention`)."""

    k_HBKA: Array
    v_HBKA: Array
    start_B: Array  # the index of the oldest token
    zero_HA: tuple[Array, Array]  # key and value of a zero hidden state
    r_HRA: Array | None
    u_HA: Array | None
    w_HA: Array | None
    bias_HR: Array | None

    def extend(self, k_BLHA: Array, v_BLHA: Array) -> tuple[Array, Array]:
        """Returns the keys and values of memory and segment, k_BKHA and v_BKHA."""
        M = self.k_HBKA.shape[2] - k_BLHA.shape[1]

        def extend_one(x_HBKA: Array, x_BLHA: Array) -> Array:
            x_HBMA = window(x_HBKA, self.start_B, M).astype(x_BLHA.dtype)
            x_HBLA = heads_first(x_BLHA)
            return jnp.concatenate([x_HBMA, x_HBLA], axis=2).transpose(1, 2, 0, 3)

        return extend_one(self.k_HBKA, k_BLHA), extend_one(self.v_HBKA, v_BLHA)

    def distances(self, K: int) -> PositionTerms:
        """Returns the distances of K keys, the last K rows."""
        r_RHA, bias_HR = self.r_HRA, self.bias_HR
        if r_RHA is not None:
            r_RHA = jnp.swapaxes(r_RHA[:, -K:], 0, 1)
        if bias_HR is not None:
            bias_HR = bias_HR[:, -K:]
        return PositionTerms(r_RHA, self.u_HA, self.w_HA, bias_HR)


@flax.struct.dataclass
class KeyValueMemory:
    """The keys and values of the newest M tokens of every layer, in time order.

    A layer holds the K = M + L keys over which the last segment attended. The memory is
    a window of M keys; it starts at the number of real tokens in that segment. The next
    segment moves the window when it appends its keys, so each key is written once per
    segment; a second copy would cost as much as the products. filled_B has the same
    meaning as in `Memory`. `decoder.Decoder` reads this memory.
    """

    layers: tuple[KeyValues, ...]
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, config: ModelConfig, params: Any, memory: Memory, tgt_len: int
    ) -> "KeyValueMemory":
        """Returns the keys and values of a memory, for segments of tgt_len.

        `params` are unstacked (`decoder.unstack`).
        """
        dtype, scheme = config.compute_dtype, SCHEMES[config.position]
        B, M = memory.filled_B.shape[0], memory.mem_len
        K = M + tgt_len
        R_RD = scheme.encoding(config, K).astype(dtype) if scheme.encoding else None

        def pad(x_BMHA: Array) -> Array:
            x_HBMA = heads_first(x_BMHA)
            return jnp.pad(x_HBMA, ((0, 0), (0, 0), (tgt_len, 0), (0, 0)))

        def layer(n: int) -> KeyValues:
            own = params[f"layers_{n}"]["attention"]
            k_BMHA, v_BMHA = project(config, own, memory.layer(n).astype(dtype))
            zero_11D = jnp.zeros((1, 1, config.d_model), dtype)
            zero_k, zero_v = project(config, own, zero_11D)
            untied = config.untie_r or scheme.untied
            biases = {
                name: (params[name][n] if untied else params[name]).astype(dtype)
                for name in scheme.biases
            }
            r_RHA, *others = position_terms(
                config, lambda name, *_: own[name].astype(dtype), R_RD, biases, K
            )
            r_HRA = None if r_RHA is None else jnp.swapaxes(r_RHA, 0, 1)
            start_B = jnp.full(B, tgt_len, jnp.int32)
            zero_HA = zero_k[0, 0], zero_v[0, 0]
            return KeyValues(pad(k_BMHA), pad(v_BMHA), start_B, zero_HA, r_HRA, *others)

        return cls(tuple(map(layer, range(config.n_layer))), memory.filled_B, M)

    def layer(self, n: int) -> KeyValues:
        """Returns the memory of layer n."""
        return self.layers[n]

    def append(
        self,
        extended: list[tuple[Array, Array]],
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "KeyValueMemory":
        """Returns the memory after a segment; `extended` has each layer's new k and v.

        As in `Memory.append`, each stream keeps its M newest real tokens.
        """
        M = self.mem_len
        B, K = extended[0][0].shape[:2]
        if length_B is None:
            length_B = jnp.full(B, K - M, jnp.int32)
        layers = tuple(
            layer._replace(
                k_HBKA=heads_first(k_BKHA).astype(layer.k_HBKA.dtype),
                v_HBKA=heads_first(v_BKHA).astype(layer.v_HBKA.dtype),
                start_B=length_B,
            )
            for layer, (k_BKHA, v_BKHA) in zip(self.layers, extended, strict=True)
        )
        filled_B = count_filled(self.filled_B, M, length_B, first_BL)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)

    def zero(self, where_B: Array) -> "KeyValueMemory":
        """Returns the memory with visible zeros in the streams where_B (bool)."""

        def zero(x_HBKA: Array, zero_HA: Array) -> Array:
            zero_H11A = zero_HA.astype(x_HBKA.dtype)[:, None, None]
            return jnp.where(where_B[:, None, None], zero_H11A, x_HBKA)

        layers = tuple(
            layer._replace(
                k_HBKA=zero(layer.k_HBKA, layer.zero_HA[0]),
                v_HBKA=zero(layer.v_HBKA, layer.zero_HA[1]),
            )
            for layer in self.layers
        )
        filled_B = jnp.where(where_B, self.mem_len, self.filled_B)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)


def project(config: ModelConfig, params: Any, h_BMD: Array) -> tuple[Array, Array]:
    """Returns the keys and values of hidden states in one layer.

    `params` are the unstacked parameters of the layer's attention.
    """
    dtype = config.compute_dtype
    if config.pre_lnorm:
        h_BMD = feature_norm(config).apply({"params": params["norm"]}, h_BMD)
    _, k_HAD, v_HAD = jnp.moveaxis(params["qkv"].astype(dtype), 0, -1)
    k_BMHA, v_BMHA = (jnp.einsum("BMD,HAD->BMHA", h_BMD, x) for x in (k_HAD, v_HAD))
    if config.qk_norm:
        k_BMHA = head_norm(config).apply({"params": params["k_norm"]}, k_BMHA)
    return k_BMHA, v_BMHA
