"""The memory as keys and values, for evaluation and generation.

With fixed parameters, a token's keys and values and the projected distances never
change. They are computed once, whereas training projects the memory again for every
segment. Results equal `memory.Memory`'s.

Dims: J = 3 of q, k and v, Y tokens.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands, PositionTerms
from txl_jax.kernels.product import product
from txl_jax.kernels.xla import heads_first
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastState, FastWeights, LayerWeights
from txl_jax.model.interval import (
    Call,
    count_filled,
    initially_filled,
    newest,
    window,
)
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params, feature_norm, head_norm
from txl_jax.model.positions import SCHEMES, position_terms


@flax.struct.dataclass
class KeyValues:
    """One layer's keys and values, and its position terms (`kernels.operands`).

    window_len: if it divides the L tokens of a call, the kernel reads window_len of
        them at a time, and their M + window_len keys.
    """

    k_HBKA: Array
    v_HBKA: Array
    start_B: Array  # the index of the oldest token
    zero_HA: tuple[Array, Array]  # key and value of a zero hidden state
    r_HRA: Array | None
    u_HA: Array | None
    w_HA: Array | None
    bias_HR: Array | None
    window_len: int = flax.struct.field(pytree_node=False)

    def extend(self, own: Operands) -> tuple[Operands, int]:
        """Returns (operands over memory and segment, W), given the segment's.

        W: the number of queries that the kernel reads at a time.
        """
        L = own.k_BKHA.shape[1]
        M = self.k_HBKA.shape[2] - L

        def join(x_HBKA: Array, x_BLHA: Array) -> Array:
            x_HBMA = window(x_HBKA, self.start_B, M).astype(x_BLHA.dtype)
            x_HBLA = heads_first(x_BLHA)
            return jnp.concatenate([x_HBMA, x_HBLA], axis=2).transpose(1, 2, 0, 3)

        W = self.window_len if L % self.window_len == 0 else L
        return own._replace(
            k_BKHA=join(self.k_HBKA, own.k_BKHA),
            v_BKHA=join(self.v_HBKA, own.v_BKHA),
            position=self.distances(M + W),
        ), W

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
    fast: FastState | None = None

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        params: Params,
        batch_size: int,
        tgt_len: int,
        mem_len: int | None = None,
        window_len: int = 0,
    ) -> "KeyValueMemory":
        """Returns the initial memory, as `Memory.empty`, for calls of tgt_len tokens.

        `params` are laid out (`fixed.lay_out`). window_len: see `KeyValues`; 0 =
        tgt_len.
        """
        dtype, scheme = config.compute_dtype, SCHEMES[config.position]
        M = config.mem_len if mem_len is None else mem_len
        K = M + tgt_len
        R_RD = scheme.encoding(config, K).astype(dtype) if scheme.encoding else None

        def layer(n: int) -> KeyValues:
            own = params[f"layers_{n}"]["attention"]
            zero_11D = jnp.zeros((1, 1, config.d_model), dtype)
            k_11HA, v_11HA = project_states(config, own, zero_11D)
            zero_HA = k_11HA[0, 0], v_11HA[0, 0]
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
            terms = position_terms(
                config, lambda name, *_: own[name].astype(dtype), R_RD, biases, K
            )
            r_RHA = terms.r_RHA
            r_HRA = None if r_RHA is None else jnp.swapaxes(r_RHA, 0, 1)
            start_B = jnp.full(batch_size, tgt_len, jnp.int32)
            return KeyValues(
                k_HBKA,
                v_HBKA,
                start_B,
                zero_HA,
                r_HRA,
                u_HA=terms.u_HA,
                w_HA=terms.w_HA,
                bias_HR=terms.bias_HR,
                window_len=window_len or tgt_len,
            )

        layers = tuple(map(layer, range(config.n_layer)))
        fast = None
        if config.fast_weights:
            sizes = config.n_layer, batch_size, M, config.n_head, 2
            fast = FastState.empty(config, batch_size)
            fast = dataclasses.replace(fast, rate_NBMHJ=jnp.zeros(sizes, jnp.float32))
        return cls(layers, initially_filled(config, batch_size, M), M, fast)

    @classmethod
    def of(
        cls, config: ModelConfig, params: Params, memory: Memory, tgt_len: int
    ) -> "KeyValueMemory":
        """Returns the keys and values of a `Memory`, for calls of tgt_len tokens.

        `params` are laid out (`fixed.lay_out`).
        """
        B, M = len(memory.filled_B), memory.mem_len
        own_N = [params[f"layers_{n}"]["attention"] for n in range(config.n_layer)]
        pairs = [*zip(own_N, memory.h_NBMD, strict=True)]
        states = [project_states(config, own, h_BMD) for own, h_BMD in pairs]
        k_NHBMA, v_NHBMA = (
            jnp.stack([heads_first(x_BMHA) for x_BMHA in each])
            for each in zip(*states, strict=True)
        )
        empty = cls.empty(config, params, B, tgt_len, M)
        result = empty.resume(k_NHBMA, v_NHBMA, memory.filled_B)
        if memory.fast is None:
            return result
        rates: Any = [
            FastWeights(config).apply(
                {"params": own["fast"]}, normed(config, own, h_BMD), method="find_rates"
            )
            for own, h_BMD in pairs
        ]
        fast = dataclasses.replace(memory.fast, rate_NBMHJ=jnp.stack(rates))
        return dataclasses.replace(result, fast=fast)

    def resume(
        self, k_NHBMA: Array, v_NHBMA: Array, filled_B: Array
    ) -> "KeyValueMemory":
        """Returns an initial memory with these keys and values, the newest that fit."""
        M = self.mem_len

        def fill(x_HBKA: Array, saved_HBMA: Array) -> Array:
            new_HBMA = newest(saved_HBMA, M, axis=2).astype(x_HBKA.dtype)
            return jnp.concatenate([x_HBKA[:, :, M:], new_HBMA], axis=2)

        layers = tuple(
            dataclasses.replace(
                layer, k_HBKA=fill(layer.k_HBKA, k_HBMA), v_HBKA=fill(layer.v_HBKA, v)
            )
            for layer, k_HBMA, v in zip(self.layers, k_NHBMA, v_NHBMA, strict=True)
        )
        filled_B = jnp.minimum(filled_B, M)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)

    def append(
        self, kv: list[tuple[Array, Array]], call: Call, fast: LayerWeights | None
    ) -> "KeyValueMemory":
        """Returns the memory after a call, given each layer's k_BKHA and v_BKHA."""
        M = self.mem_len
        layers = tuple(
            dataclasses.replace(
                layer,
                k_HBKA=heads_first(k_BKHA).astype(layer.k_HBKA.dtype),
                v_HBKA=heads_first(v_BKHA).astype(layer.v_HBKA.dtype),
                start_B=call.length_B,
            )
            for layer, (k_BKHA, v_BKHA) in zip(self.layers, kv, strict=True)
        )
        filled_B = count_filled(self.filled_B, M, call.length_B, call.first_BL)
        state = self.fast.append(fast, call, M) if self.fast and fast else None
        return dataclasses.replace(self, layers=layers, filled_B=filled_B, fast=state)

    def show_zeros(self, where_B: Array) -> "KeyValueMemory":
        """Returns the memory with visible zero states in the streams where_B (bool)."""
        where_B11 = where_B[:, None, None]

        def zero(x_HBKA: Array, zero_HA: Array) -> Array:
            zero_H11A = zero_HA.astype(x_HBKA.dtype)[:, None, None]
            return jnp.where(where_B11, zero_H11A, x_HBKA)

        layers = tuple(
            dataclasses.replace(
                layer,
                k_HBKA=zero(layer.k_HBKA, layer.zero_HA[0]),
                v_HBKA=zero(layer.v_HBKA, layer.zero_HA[1]),
            )
            for layer in self.layers
        )
        filled_B = jnp.where(where_B, self.mem_len, self.filled_B)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)


def by_windows(kernel: Kernel, operands: Operands, W: int) -> Array:
    """Returns the kernel's o_BLHA, from W queries and their M + W keys at a time.

    Scores of all queries at once would not stay in a CPU's cache.
    """
    L = operands.q_BLHA.shape[1]
    K = operands.k_BKHA.shape[1] - L + W
    # In the reference kernel's layout, a window's keys are contiguous.
    k_HBKA, v_HBKA = heads_first(operands.k_BKHA), heads_first(operands.v_BKHA)

    def attend(start: Array) -> Array:
        def cut(x: Array, size: int, axis: int = 1) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        q_BWHA, oldest_BW = cut(operands.q_BLHA, W), cut(operands.oldest_BL, W)
        k_BKHA, v_BKHA = (
            cut(x_HBKA, K, axis=2).transpose(1, 2, 0, 3) for x_HBKA in (k_HBKA, v_HBKA)
        )
        window = operands._replace(
            q_BLHA=q_BWHA, k_BKHA=k_BKHA, v_BKHA=v_BKHA, oldest_BL=oldest_BW - start
        )
        return kernel(window)

    o_SBWHA = jax.lax.map(attend, jnp.arange(0, L, W))
    return jnp.moveaxis(o_SBWHA, 0, 1).reshape(operands.q_BLHA.shape)


def normed(config: ModelConfig, params: Params, h_BKD: Array) -> Array:
    """Returns states as an attention with these parameters projects them."""
    if not config.pre_lnorm:
        return h_BKD
    result: Array = feature_norm(config).apply({"params": params["norm"]}, h_BKD)
    return result


def project_states(
    config: ModelConfig, params: Params, h_BKD: Array
) -> tuple[Array, Array]:
    """Returns the keys and values of one layer's hidden states, [B, K, H, A].

    `params` are the attention's, laid out.
    """
    _, k_BKHA, v_BKHA = project_all(config, params, normed(config, params, h_BKD))
    return k_BKHA, v_BKHA


def project_all(
    config: ModelConfig, params: Params, x_BYD: Array
) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values of states as they are projected."""
    qkv_DJHA = params["qkv"].astype(config.compute_dtype)
    qkv_BYJHA = product("BYD,DJHA->BYJHA", x_BYD, qkv_DJHA)
    q_BYHA, k_BYHA, v_BYHA = (qkv_BYJHA[:, :, j] for j in range(3))
    if config.qk_norm:
        norm = head_norm(config)
        q_BYHA = norm.apply({"params": params["q_norm"]}, q_BYHA)
        k_BYHA = norm.apply({"params": params["k_norm"]}, k_BYHA)
    return q_BYHA, k_BYHA, v_BYHA
