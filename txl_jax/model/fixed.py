"""The Transformer-XL with fixed parameters, for evaluation and generation.

It reads with a memory of keys and values (`key_values`), or for one token at a time
with rings of them (`ring`). Results equal those of `txl.TransformerXL`.

Dims: J = 3 of q, k and v, P = 2 parts of o, of C = D / 2 columns each, X = H A.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands, PositionTerms
from txl_jax.kernels.product import product
from txl_jax.model.adaptive import EmbeddingAndSoftmax
from txl_jax.model.block import ACTIVATIONS, attend
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastWeights, LayerWeights
from txl_jax.model.interval import Call, start_call
from txl_jax.model.key_values import (
    KeyValueMemory,
    KeyValues,
    by_windows,
    normed,
    project_all,
)
from txl_jax.model.modules import Gate, Params, feature_norm
from txl_jax.model.positions import SCHEMES
from txl_jax.model.ring import RingLayer, RingMemory

FixedMemory = TypeVar("FixedMemory", bound=KeyValueMemory | RingMemory)


def lay_out(params: Params) -> Params:
    """Returns the stacked parameters of a `TransformerXL` as separate ones.

    XLA:CPU reads the result fastest for one token. Slices of stacked parameters would
    be copies, which take most of that time, so every layer has separate parameters.
    W_q, W_k and W_v are one matrix, qkv_DJHA; W_o is two halves, o_PHAC, which are
    computed on two cores; the feed-forward's second matrix is [D, F].
    """

    def lay_out_layer(layer: Params) -> Params:
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
        f"layers_{n}": lay_out_layer(jax.tree.map(lambda leaf, n=n: leaf[n], layers))
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | separate


class FixedTransformerXL(NamedTuple):
    """`TransformerXL` with parameters that `lay_out` has laid out.

    The memory is a `KeyValueMemory`, for calls of the length that it was made for, or a
    `RingMemory`, for calls of one token.
    kernel: attends instead of the config's kernel.
    """

    config: ModelConfig
    params: Params
    kernel: Kernel | None = None

    @property
    def embedding(self) -> EmbeddingAndSoftmax:
        """The embedding and the softmax, with their parameters."""
        parameters = {"params": self.params["embedding"]}
        return EmbeddingAndSoftmax(self.config).bind(parameters)

    def __call__(
        self, tokens_BL: Array, memory: FixedMemory, **segment: Any
    ) -> tuple[Array, FixedMemory]:
        """Returns (hidden_BLD, memory); for `**segment` see `TransformerXL.__call__`.

        A `RingMemory` takes one real token per stream.
        """
        inputs_BLD = self.embedding.embed(jnp.asarray(tokens_BL))
        return self.read_inputs(inputs_BLD, memory, **segment)

    def nll(
        self, tokens_BL: Array, targets_BL: Array, memory: FixedMemory, **segment: Any
    ) -> tuple[Array, FixedMemory]:
        """Returns (nll_BL in nats, memory)."""
        hidden_BLD, memory = self(tokens_BL, memory, **segment)
        return self.embedding.nll(hidden_BLD, targets_BL), memory

    def logits(
        self, tokens_BL: Array, memory: FixedMemory, **segment: Any
    ) -> tuple[Array, FixedMemory]:
        """Returns (normalized log-probabilities logits_BLV, memory)."""
        hidden_BLD, memory = self(tokens_BL, memory, **segment)
        return self.embedding.log_probs(hidden_BLD), memory

    def read_inputs(
        self, inputs_BLD: Array, memory: FixedMemory, **segment: Any
    ) -> tuple[Array, FixedMemory]:
        """Returns (hidden_BLD, memory) of embeddings instead of tokens."""
        config, dtype, L = self.config, self.config.compute_dtype, inputs_BLD.shape[1]
        if isinstance(memory, RingMemory) and segment.get("length_B") is not None:
            raise ValueError("a ring takes one real token per stream: omit length_B")
        if isinstance(memory, KeyValueMemory):
            made_for = memory.layers[0].k_HBKA.shape[2] - memory.mem_len
            if L != made_for:
                raise ValueError(f"this memory is for calls of {made_for} tokens")
        memory, call = start_call(config, memory, L, **segment)
        h_BLD = inputs_BLD.astype(dtype)
        if embeddings := SCHEMES[config.position].embeddings:
            h_BLD += embeddings(config, L).astype(dtype)
        layers: Sequence[KeyValues | RingLayer] = memory.layers
        new: list[Any] = []
        states: list[LayerWeights | None] = []
        for n, layer in enumerate(layers):
            state = None
            if memory.fast:
                state = jax.tree.map(lambda x_N, n=n: x_N[n], memory.fast.layers)
            params = self.params[f"layers_{n}"]
            h_BLD, kv, state = read_layer(
                config, params, h_BLD, layer, state, call, self.kernel
            )
            new.append(kv)
            states.append(state)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
        after: Any = memory.append(new, call, stacked)
        return h_BLD, after


def read_layer(
    config: ModelConfig,
    params: Params,
    h_BLD: Array,
    layer: KeyValues | RingLayer,
    state: LayerWeights | None,
    call: Call,
    kernel: Kernel | None,
) -> tuple[Array, Any, LayerWeights | None]:
    """Returns (a layer's output, its new keys and values, its new fast weights)."""
    dtype, L = config.compute_dtype, h_BLD.shape[1]
    if make_inputs := SCHEMES[config.position].inputs:
        h_BLD += make_inputs(config, lambda name, *_: params[name].astype(dtype), L)
    own: Params = params["attention"]
    x_BLD = normed(config, own, h_BLD)
    q_BLHA, k_BLHA, v_BLHA = project_all(config, own, x_BLD)
    operands = Operands(q_BLHA, k_BLHA, v_BLHA, PositionTerms(), call.oldest_BL)
    new: Any
    if isinstance(layer, RingLayer):
        o_BLHA, new = layer.attend(operands)
        left = layer.left(new) if state else None
    else:
        operands, W = layer.extend(operands)
        run = functools.partial(attend, config, kernel=kernel)
        o_BLHA = run(operands) if W == L else by_windows(run, operands, W)
        new = operands.k_BKHA, operands.v_BKHA
        left = new[0][:, :L], new[1][:, :L]
    if state:
        fast: Any = FastWeights(config)
        o_BLHA, state = fast.apply(
            {"params": own["fast"]}, o_BLHA, x_BLD, k_BLHA, left, state, call
        )
    out_BLD = join_heads(o_BLHA, own["o_halves"].astype(dtype))
    h_BLD = end_sublayer(config, own, h_BLD, out_BLD)
    return feed_forward(config, params["feed_forward"], h_BLD), new, state


def join_heads(o_BLHA: Array, o_PHAC: Array) -> Array:
    """Returns the attention's output, out_BLD."""
    # With two contracted dimensions, XLA:CPU would transpose the weights first, which
    # takes as long as the product.
    P, H, A, C = o_PHAC.shape
    B, L = o_BLHA.shape[:2]
    o_PBLX = jnp.broadcast_to(o_BLHA.reshape(B, L, H * A), (P, B, L, H * A))
    o_PXC = o_PHAC.reshape(P, H * A, C)
    return product("PBLX,PXC->BLPC", o_PBLX, o_PXC).reshape(B, L, P * C)


def feed_forward(config: ModelConfig, params: Params, h_BLD: Array) -> Array:
    """Returns h_BLD after the sublayer; see `block.FeedForward`."""
    dtype = config.compute_dtype

    def linear(name: str, subscripts: str, x_BLX: Array) -> Array:
        kernel, bias = (params[name][part].astype(dtype) for part in ("kernel", "bias"))
        return product(subscripts, x_BLX, kernel) + bias

    x_BLD = normed(config, params, h_BLD)
    x_BLF = linear("in", "BLD,DF->BLF", x_BLD)
    if config.gated:
        activation = ACTIVATIONS[config.feed_forward]
        x_BLF *= activation(linear("gate", "BLD,DF->BLF", x_BLD))
    else:
        x_BLF = nn.relu(x_BLF)
    out_BLD = linear("out_DF", "BLF,DF->BLD", x_BLF)
    return end_sublayer(config, params, h_BLD, out_BLD)


def end_sublayer(
    config: ModelConfig, params: Params, x_BLD: Array, y_BLD: Array
) -> Array:
    """Returns the end of a sublayer; see `modules.add_residual`."""
    if config.gate == "none":
        sum_BLD = x_BLD + y_BLD
    else:
        gate: Any = Gate(config)
        sum_BLD = gate.apply({"params": params["gru"]}, x_BLD, nn.relu(y_BLD))
    if config.pre_lnorm:
        return sum_BLD
    result: Array = feature_norm(config).apply({"params": params["norm"]}, sum_BLD)
    return result
