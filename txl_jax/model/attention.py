"""Multi-head attention over memory and segment (sections 3.2 and 3.3).

Dims: B streams, L segment, M memory, K = M + L keys, R distances, D model, H heads,
A head.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import hash
from txl_jax.kernels.dispatch import choose_kernel
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, seed
from txl_jax.model.heads import project_heads
from txl_jax.model.initializers import layer_norm, weights
from txl_jax.model.positions import scores


class Attention(nn.Module):
    """The attention sublayer: projections, kernel, output, residual and LayerNorm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        h_BMD: Array,
        biases: dict[str, Array],
        R_RD: Array | None,
        oldest_BL: Array,
    ) -> Array:
        """Returns h_BLD after the sublayer.

        h_BMD is the layer's memory; biases [H, A] and R_RD belong to the position
        scheme. With pre_lnorm, memory and segment are normalised and the residual adds
        the raw input; otherwise the sum is normalised.
        """
        config, make = self.config, weights(self)
        D, H, A = config.d_model, config.n_head, config.d_head
        norm = layer_norm(config, name="norm")
        # D is last in each matrix: a TPU pads the last dimension to 128, and A is 64.
        q_HAD, k_HAD, v_HAD, o_HAD = (make(name, "HAD", (H, A, D)) for name in "qkvo")

        # Equation 2: queries come from the segment, keys and values also from memory.
        h_BKD = jnp.concatenate([h_BMD.astype(h_BLD.dtype), h_BLD], axis=1)
        M, K = h_BMD.shape[1], h_BKD.shape[1]
        if config.pre_lnorm:
            x_BLD, x_BKD, fixed = norm(h_BLD), norm(h_BKD), 0  # norm learns from memory
        else:
            x_BLD, x_BKD, fixed = h_BLD, h_BKD, M
        q_BLHA = jnp.einsum("BLD,HAD->BLHA", x_BLD, q_HAD)
        k_BKHA = project_heads(x_BKD, k_HAD, fixed)
        v_BKHA = project_heads(x_BKD, v_HAD, fixed)

        position = scores(config, make, R_RD, biases, K)
        dropout = None
        if config.dropatt and self.has_rng("dropout"):
            dropout = hash.Dropout(config.dropatt, seed(self))
        kernel = choose_kernel(config.kernel, q_BLHA)
        o_BLHA = kernel(q_BLHA, k_BKHA, v_BKHA, *position, oldest_BL, dropout)

        out_BLD = jnp.einsum("BLHA,HAD->BLD", o_BLHA, o_HAD)
        sum_BLD = h_BLD + Dropout(config.dropout, config.variational)(out_BLD)
        return sum_BLD if config.pre_lnorm else norm(sum_BLD)
