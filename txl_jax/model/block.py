"""One layer: attention, then the feed-forward (section 3.3, last equations).

Dims: B streams, L segment, M memory, R distances, D model, F feed-forward, H heads,
A head.
"""

from typing import Any

import flax.linen as nn
from jax import Array

from txl_jax.model.attention import Attention
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout
from txl_jax.model.initializers import layer_norm, normal, weight
from txl_jax.model.positions import SCHEMES


class FeedForward(nn.Module):
    """The position-wise sublayer: norm, two products with a ReLU, and the residual.

    stacked: its second matrix is [F, D]; otherwise [D, F], see `key_values.unstack`.
    """

    config: ModelConfig
    stacked: bool = True

    @nn.compact
    def __call__(self, h_BLD: Array) -> Array:
        """Returns h_BLD after the sublayer."""
        config = self.config
        D, F = config.d_model, config.d_inner

        def dense(name: str, letters: str, shape: tuple[int, int], made: str) -> Any:
            product = f"BL{letters.replace(made, '')},{letters}->BL{made}"
            return nn.Einsum(
                *(shape, product),
                dtype=config.compute_dtype,
                kernel_init=weight(config, letters),
                bias_init=normal(0, made),
                name=name,
            )

        def drop(x: Array, relu: bool = False) -> Array:
            return Dropout(config.dropout, config.variational, relu)(x)

        norm = layer_norm(config, name="norm")
        x_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        x_BLF = drop(dense("in", "DF", (D, F), "F")(x_BLD), relu=True)
        back = ("FD", (F, D)) if self.stacked else ("DF", (D, F))
        sum_BLD = h_BLD + drop(dense("out", *back, "D")(x_BLF))
        return sum_BLD if config.pre_lnorm else norm(sum_BLD)


class Block(nn.Module):
    """One layer, in the shape that a scan over layers wants; see FeedForward."""

    config: ModelConfig
    stacked: bool = True

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        layer: Any,
        biases: dict[str, Array],
        R_RD: Array | None,
        oldest_BL: Array,
    ) -> tuple[Array, Any]:
        """Returns (output h_BLD, what `layer`, this layer's memory, is to append)."""
        config = self.config
        x_BLD = h_BLD
        if inputs := SCHEMES[config.position].inputs:

            def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
                return self.param(name, weight(config, letters), shape)

            rows_LD = inputs(config, make, h_BLD.shape[1])
            x_BLD = h_BLD + rows_LD.astype(h_BLD.dtype)
        attention = Attention(config, name="attention")
        x_BLD, kept = attention(x_BLD, layer, biases, R_RD, oldest_BL)
        return FeedForward(config, self.stacked, name="feed_forward")(x_BLD), kept
