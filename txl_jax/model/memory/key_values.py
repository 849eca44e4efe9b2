"""The memory as keys and values, for evaluation and generation.

With fixed parameters, a token's keys and values and the projected distances never
change. They are computed once, whereas training projects the memory again for every
segment. Results equal `cache.Memory`'s. `unstack` lays the parameters out.

Dims: J = 3 of q, k and v, P = 2 parts of C = D / 2 columns, X = H A, Y tokens.
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
from txl_jax.model.initializers import Params, feature_norm, head_norm
from txl_jax.model.memory.interval import count_filled, initially_filled, newest, window
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

    def before(self, h_BLD: Array) -> None:
        """There are no states to project."""

    def attend(
        self, own: Operands, h_BKD: Array, x_BKD: Array, kernel: Kernel
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns (o_BLHA, the keys and values of memory and segment)."""
        L = own.k_BKHA.shape[1]
        M = self.k_HBKA.shape[2] - L

        def extend(x_HBKA: Array, x_BLHA: Array) -> Array:
            x_HBMA = window(x_HBKA, self.start_B, M).astype(x_BLHA.dtype)
            x_HBLA = heads_first(x_BLHA)
            return jnp.concatenate([x_HBMA, x_HBLA], axis=2).transpose(1, 2, 0, 3)

        k_BKHA = extend(self.k_HBKA, own.k_BKHA)
        v_BKHA = extend(self.v_HBKA, own.v_BKHA)
        W = self.window_len if L % self.window_len == 0 else L
        position = self.distances(M + W)
        operands = own._replace(k_BKHA=k_BKHA, v_BKHA=v_BKHA, position=position)
        o_BLHA = kernel(operands) if W == L else by_windows(kernel, operands, W)
        return o_BLHA, (k_BKHA, v_BKHA)

    def distances(self, K: int) -> PositionTerms:
        """Returns the position terms of K keys, the last K rows."""
        r_RHA, bias_HR = self.r_HRA, self.bias_HR
        if r_RHA is not None:
            r_RHA = jnp.swapaxes(r_RHA[:, -K:], 0, 1)
        if bias_HR is not None:
            bias_HR = bias_HR[:, -K:]
        return PositionTerms(r_RHA, self.u_HA, self.w_HA, bias_HR)

    def leaving(self, own: Operands, kept: tuple[Array, Array]) -> tuple[Array, Array]:
        """See `cache.CacheLayer.leaving`."""
        L, (k_BKHA, v_BKHA) = own.q_BLHA.shape[1], kept
        return k_BKHA[:, :L], v_BKHA[:, :L]


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
        window_len: int = 0,
    ) -> "KeyValueMemory":
        """Returns the initial memory, as `Memory.empty`, for calls of tgt_len tokens.

        `params` are laid out (`unstack`). window_len: see `KeyValues`; 0 =
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

        filled_B = initially_filled(config, batch_size, M)
        return cls(tuple(map(layer, range(config.n_layer))), filled_B, M)

    @classmethod
    def of(
        cls, config: ModelConfig, params: Params, memory: Any, tgt_len: int
    ) -> "KeyValueMemory":
        """Returns the keys and values of a `Memory`, for calls of tgt_len tokens.

        `params` are laid out (`unstack`).
        """
        B, M = len(memory.filled_B), memory.mem_len
        states = [
            project_states(config, params[f"layers_{n}"]["attention"], h_BMD)
            for n, h_BMD in enumerate(memory.h_NBMD)
        ]
        k_NHBMA, v_NHBMA = (
            jnp.stack([heads_first(x_BMHA) for x_BMHA in each])
            for each in zip(*states, strict=True)
        )
        empty = cls.empty(config, params, B, tgt_len, M)
        return empty.resume(k_NHBMA, v_NHBMA, memory.filled_B)

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
            dataclasses.replace(
                layer,
                k_HBKA=heads_first(k_BKHA).astype(layer.k_HBKA.dtype),
                v_HBKA=heads_first(v_BKHA).astype(layer.v_HBKA.dtype),
                start_B=length_B,
            )
            for layer, (k_BKHA, v_BKHA) in zip(self.layers, kept, strict=True)
        )
        filled_B = count_filled(self.filled_B, M, length_B, first_BL)
        return dataclasses.replace(self, layers=layers, filled_B=filled_B)

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


def project_states(
    config: ModelConfig, params: Params, h_BKD: Array
) -> tuple[Array, Array]:
    """Returns the keys and values of one layer's hidden states, [B, K, H, A].

    `params` are the attention's, laid out.
    """
    x_BKD = h_BKD
    if config.pre_lnorm:
        x_BKD = feature_norm(config).apply({"params": params["norm"]}, h_BKD)
    _, k_BKHA, v_BKHA = project_all(x_BKD, params["qkv"].astype(config.compute_dtype))
    if config.qk_norm:
        k_BKHA = head_norm(config).apply({"params": params["k_norm"]}, k_BKHA)
    return k_BKHA, v_BKHA


def unstack(params: Params) -> Params:
    """Returns the stacked parameters of a `TransformerXL` as separate ones.

    XLA:CPU reads the result fastest for one token. Slices of stacked parameters would
    be copies, which take most of that time, so every layer has separate parameters.
    W_q, W_k and W_v are one matrix, qkv_DJHA; W_o is two halves, o_PHAC, which are
    computed on two cores; the feed-forward's second matrix is [D, F].
    """

    def lay_out(layer: Params) -> Params:
        attention, feed_forward = dict(layer["attention"]), dict(layer["feed_forward"])
        qkv_JHAD = jnp.stack([attention.pop(name) for name in "qkv"])
        attention["qkv"] = jnp.moveaxis(qkv_JHAD, -1, 0)
        attention["o_halves"] = jnp.stack(jnp.split(attention.pop("o"), 2, axis=-1))
        out = feed_forward.pop("out")
        feed_forward["out_DF"] = {"kernel": out["kernel"].T, "bias": out["bias"]}
        return layer | {"attention": attention, "feed_forward": feed_forward}

    layers = params["layers"]
    N = jax.tree.leaves(layers)[0].shape[0]
    separate = {
        f"layers_{n}": lay_out(jax.tree.map(lambda leaf, n=n: leaf[n], layers))
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | separate


def project_all(x_BYD: Array, qkv_DJHA: Array) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values."""
    qkv_BYJHA = product("BYD,DJHA->BYJHA", x_BYD, qkv_DJHA)
    return qkv_BYJHA[:, :, 0], qkv_BYJHA[:, :, 1], qkv_BYJHA[:, :, 2]


def join_heads(o_BLHA: Array, o_PHAC: Array) -> Array:
    """Returns the attention's output, out_BLD."""
    # With two contracted dimensions, XLA:CPU would transpose the weights first, which
    # takes as long as the product.
    P, H, A, C = o_PHAC.shape
    B, L = o_BLHA.shape[:2]
    o_PBLX = jnp.broadcast_to(o_BLHA.reshape(B, L, H * A), (P, B, L, H * A))
    o_PXC = o_PHAC.reshape(P, H * A, C)
    return product("PBLX,PXC->BLPC", o_PBLX, o_PXC).reshape(B, L, P * C)
