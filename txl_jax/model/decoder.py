"""The Transformer-XL with fixed parameters, for evaluation and generation.

Training scans over stacked layers. Slicing stacked parameters copies them, which would
take most of the time of a one-token step. Here every layer has separate parameters, in
the layout that XLA:CPU reads fastest for one token.

Dims: J = 3 of q, k and v, P = 2 parts of C = D / 2 columns, X = H A.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.dispatch import choose_kernel
from txl_jax.kernels.operands import Operands
from txl_jax.model.block import FeedForward
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import feature_norm, head_norm
from txl_jax.model.key_values import KeyValues
from txl_jax.model.positions import SCHEMES, add_places, rotate_by_distance
from txl_jax.model.ring import RingLayer
from txl_jax.model.txl import AnyMemory, TransformerXL


def unstack(params: Any) -> Any:
    """Converts the parameters to the layout of `Decoder`; call it outside the loop.

    W_q, W_k and W_v become one matrix, qkv_DJHA; W_o becomes two halves, o_PHAC, which
    XLA:CPU computes on two cores; the feed-forward's second matrix becomes [D, F].
    """

    def lay_out(layer: Any) -> Any:
        attention, feed_forward = dict(layer["attention"]), dict(layer["feed_forward"])
        qkv_JHAD = jnp.stack([attention.pop(name) for name in "qkv"])
        attention["qkv"] = jnp.moveaxis(qkv_JHAD, -1, 0)
        attention["o"] = jnp.stack(jnp.split(attention["o"], 2, axis=-1))
        kernel_FD, bias_D = (feed_forward["out"][name] for name in ("kernel", "bias"))
        feed_forward["out"] = {"kernel": kernel_FD.T, "bias": bias_D}
        return layer | {"attention": attention, "feed_forward": feed_forward}

    layers = params["layers"]
    N = jax.tree.leaves(layers)[0].shape[0]
    separate = {
        f"layers_{n}": lay_out(jax.tree.map(lambda leaf, n=n: leaf[n], layers))
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | separate


class DecoderAttention(nn.Module):
    """`Attention` over the keys and values in the memory."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, h_BLD: Array, layer: KeyValues | RingLayer, oldest_BL: Array
    ) -> tuple[Array, Any]:
        """Returns (h_BLD after the sublayer, the layer's entry for `append`)."""
        config = self.config
        dtype = config.compute_dtype
        B, L, D = h_BLD.shape
        qkv_DJHA: Array = self.get_variable("params", "qkv").astype(dtype)
        o_PHAC: Array = self.get_variable("params", "o").astype(dtype)
        norm = feature_norm(config, name="norm")
        x_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        qkv_BLJHA = jnp.einsum("BLD,DJHA->BLJHA", x_BLD, qkv_DJHA)
        q_BLHA, k_BLHA, v_BLHA = (qkv_BLJHA[:, :, j] for j in range(3))
        q_BLHA = head_norm(config, "q_norm")(q_BLHA)
        k_BLHA = head_norm(config, "k_norm")(k_BLHA)
        kept: Any
        if isinstance(layer, RingLayer):
            turn = SCHEMES[config.position].rotate
            o_BLHA, kept = layer.attend(q_BLHA, k_BLHA, v_BLHA, oldest_BL[:, 0], turn)
        else:
            k_BKHA, v_BKHA = kept = layer.extend(k_BLHA, v_BLHA)
            position = layer.distances(k_BKHA.shape[1])
            operands = Operands(q_BLHA, k_BKHA, v_BKHA, position, oldest_BL)
            o_BLHA = self.attend(rotate_by_distance(config, operands))
        # With two contracted dimensions, XLA:CPU would transpose the weights first,
        # which takes as long as the product.
        P, H, A, C = o_PHAC.shape
        o_PBLX = jnp.broadcast_to(o_BLHA.reshape(B, L, H * A), (P, B, L, H * A))
        o_PXC = o_PHAC.reshape(P, H * A, C)
        out_BLPC = jnp.einsum("PBLX,PXC->BLPC", o_PBLX, o_PXC)
        sum_BLD = h_BLD + out_BLPC.reshape(B, L, D)
        return (sum_BLD if config.pre_lnorm else norm(sum_BLD)), kept

    def attend(self, operands: Operands) -> Array:
        """Returns the kernel's o_BLHA; maps of attention intercept the call."""
        K = operands.k_BKHA.shape[1]
        return choose_kernel(self.config.kernel, operands.q_BLHA, K)(operands)


class DecoderBlock(nn.Module):
    """One layer: `Block` with fixed parameters."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, h_BLD: Array, layer: KeyValues | RingLayer, oldest_BL: Array
    ) -> tuple[Array, Any]:
        """Returns (the layer's output, its entry for the memory's `append`)."""

        def weight(name: str, *_: Any) -> Array:
            return self.get_variable("params", name).astype(h_BLD.dtype)

        h_BLD = add_places(self.config, weight, h_BLD)
        attention = DecoderAttention(self.config, name="attention")
        h_BLD, kept = attention(h_BLD, layer, oldest_BL)
        return FeedForward(self.config, "DF", name="feed_forward")(h_BLD), kept


class Decoder(TransformerXL):
    """The model with the parameters of `unstack` and a memory of keys and values.

    The methods are those of `TransformerXL`. The memory is a `KeyValueMemory`, or a
    `RingMemory` for one token at a time. Attention has no dropout.
    """

    def make_layers(self) -> list[DecoderBlock]:
        """Returns the layers, each with its own parameters."""
        return [DecoderBlock(self.config) for _ in range(self.config.n_layer)]

    def run_layers(
        self, h_BLD: Array, memory: AnyMemory, oldest_BL: Array
    ) -> tuple[Array, Any]:
        """Returns (the last layer's output, each layer's entry for `append`)."""
        entries = []
        for n, layer in enumerate(self.layers):
            h_BLD, kept = layer(h_BLD, memory.layer(n), oldest_BL)
            entries.append(kept)
        return h_BLD, entries
