"""One layer: relative attention, then the feed-forward (section 3.3, last equations).

Dims: B streams, L segment, M memory, R distances, D model, F feed-forward, H heads,
A head.
"""

import flax.linen as nn
from jax import Array

from txl_jax.model.attention import RelAttention, layer_norm, normal
from txl_jax.model.config import ModelConfig


class FeedForward(nn.Module):
    """The position-wise sublayer: norm, two products with a ReLU, and the residual."""

    config: ModelConfig

    @nn.compact
    def __call__(self, h_BLD: Array) -> Array:
        """Returns h_BLD after the sublayer."""
        config = self.config
        deterministic = not self.has_rng("dropout")

        def dense(name: str, features: int, letters: str) -> nn.Dense:
            bias = nn.with_logical_partitioning(nn.initializers.zeros, (letters[-1],))
            return nn.Dense(
                features,
                dtype=config.compute_dtype,
                kernel_init=normal(config.init_std, letters),
                bias_init=bias,
                name=name,
            )

        norm = layer_norm(config, "norm")
        x_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        x_BLF = nn.relu(dense("in", config.d_inner, "DF")(x_BLD))
        x_BLF = nn.Dropout(config.dropout, deterministic=deterministic)(x_BLF)
        x_BLD = dense("out", config.d_model, "FD")(x_BLF)
        x_BLD = nn.Dropout(config.dropout, deterministic=deterministic)(x_BLD)
        sum_BLD = h_BLD + x_BLD
        return sum_BLD if config.pre_lnorm else norm(sum_BLD)


class Block(nn.Module):
    """One layer, in the shape that a scan over layers wants."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        h_BMD: Array,
        R_RD: Array,
        u_HA: Array,
        w_HA: Array,
        oldest_BL: Array,
    ) -> tuple[Array, Array]:
        """Returns (output, input), each [B, L, D]: the input is what memory keeps."""
        attention = RelAttention(self.config, name="attention")
        x_BLD = attention(h_BLD, h_BMD, R_RD, u_HA, w_HA, oldest_BL)
        return FeedForward(self.config, name="feed_forward")(x_BLD), h_BLD
