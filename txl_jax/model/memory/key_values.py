"""The memory as keys and values, for evaluation and generation.

With fixed parameters, a token's keys and values and the projected distances never
change. They are computed once, whereas training projects the memory again for every
segment. Results equal those of `cache.Memory`.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands, PositionTerms
from txl_jax.kernels.xla import heads_first
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params, feature_norm, head_norm
from txl_jax.model.memory.interval import count_filled, initially_filled, window
from txl_jax.model.memory.layout import project_all
from txl_jax.model.positions import SCHEMES, position_terms


class KeyValues(NamedTuple):
    """One layer's keys and values, and its position terms (`kernels.operands`)."""

    k_HBKA: Array
    v_HBKA: Array
    start_B: Array  # the index of the oldest token
    zero_HA: tuple[Array, Array]  # key and value of a zero hidden state
    r_HRA: Array | None
    u_HA: Array | None
    w_HA: Array | None
    bias_HR: Array | None

    @property
    def states(self) -> None:
        """There are none to project."""

    def attend(
        self, own: Operands, h_BLD: Array, kernel: Kernel
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns (o_BLHA, the keys and values of memory and segment)."""
        M = self.k_HBKA.shape[2] - own.k_BKHA.shape[1]

        def extend(x_HBKA: Array, x_BLHA: Array) -> Array:
            x_HBMA = window(x_HBKA, self.start_B, M).astype(x_BLHA.dtype)
            x_HBLA = heads_first(x_BLHA)
            return jnp.concatenate([x_HBMA, x_HBLA], axis=2).transpose(1, 2, 0, 3)

        k_BKHA = extend(self.k_HBKA, own.k_BKHA)
        v_BKHA = extend(self.v_HBKA, own.v_BKHA)
        position = self.distances(k_BKHA.shape[1])
        operands = own._replace(k_BKHA=k_BKHA, v_BKHA=v_BKHA, position=position)
        return kernel(operands), (k_BKHA, v_BKHA)

    def distances(self, K: int) -> PositionTerms:
        """Returns the position terms of K keys, the last K rows."""
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
    segment; a second copy would cost as much as the products.
    """

    layers: tuple[KeyValues, ...]
    filled_B: Array
    mem_len: int = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        params: Params,
        batch_size: int,
        tgt_len: int,
        mem_len: int | None = None,
    ) -> "KeyValueMemory":
        """Returns the initial memory, as `Memory.empty`, for segments of tgt_len.

        `params` are laid out (`layout.unstack`).
        """
        dtype, scheme = config.compute_dtype, SCHEMES[config.position]
        M = config.mem_len if mem_len is None else mem_len
        K = M + tgt_len
        R_RD = scheme.encoding(config, K).astype(dtype) if scheme.encoding else None

        def layer(n: int) -> KeyValues:
            own = params[f"layers_{n}"]["attention"]
            zero_HA = project_zero(config, own)
            k_HBKA, v_HBKA = (
                jnp.broadcast_to(
                    x_HA[:, None, None], (config.n_head, batch_size, K, config.d_head)
                )
                for x_HA in zero_HA
            )
            untied = config.untie_r or scheme.untied
            biases = {
                name: (params[name][n] if untied else params[name]).astype(dtype)
                for name in scheme.biases
            }
            r_RHA, *others = position_terms(
                config, lambda name, *_: own[name].astype(dtype), R_RD, biases, K
            )
            r_HRA = None if r_RHA is None else jnp.swapaxes(r_RHA, 0, 1)
            start_B = jnp.full(batch_size, tgt_len, jnp.int32)
            return KeyValues(k_HBKA, v_HBKA, start_B, zero_HA, r_HRA, *others)

        filled_B = initially_filled(config, batch_size, M)
        return cls(tuple(map(layer, range(config.n_layer))), filled_B, M)

    def append(
        self,
        kept: list[tuple[Array, Array]],
        length_B: Array | None = None,
        first_BL: Array | None = None,
    ) -> "KeyValueMemory":
        """Returns the memory after a segment; `kept` has each layer's new k and v."""
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


def project_zero(config: ModelConfig, params: Params) -> tuple[Array, Array]:
    """Returns key and value of a zero hidden state, [H, A], in one layer.

    `params` are the attention's, laid out.
    """
    h_11D = jnp.zeros((1, 1, config.d_model), config.compute_dtype)
    if config.pre_lnorm:
        h_11D = feature_norm(config).apply({"params": params["norm"]}, h_11D)
    _, k_11HA, v_11HA = project_all(h_11D, params["qkv"].astype(config.compute_dtype))
    if config.qk_norm:
        k_11HA = head_norm(config).apply({"params": params["k_norm"]}, k_11HA)
    return k_11HA[0, 0], v_11HA[0, 0]
