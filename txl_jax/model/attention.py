"""Multi-head attention over memory and segment (section 3.3).

Dims: B streams, L segment, M memory, K = M + L, R = K distances, D model, H heads,
A head, J of q, k and v, X = H A, P parts of C columns of D.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import xla
from txl_jax.kernels.choice import choose_kernel
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, seed
from txl_jax.model.heads import key_values
from txl_jax.model.initializers import layer_norm, weight
from txl_jax.model.key_values import KeyValues, RingLayer
from txl_jax.model.memory import Memory
from txl_jax.model.positions import scores


class Attention(nn.Module):
    """One attention sublayer: norm, projections, kernel, output and residual."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        layer: Array | KeyValues | RingLayer,
        biases: dict[str, Array],
        R_RD: Array | None,
        oldest_BL: Array,
    ) -> tuple[Array, Any]:
        """Returns (h_BLD after the sublayer, what its memory is to append).

        `layer` is this layer's memory: its inputs h_BMD, or what was made of them while
        the parameters stand still. biases [H, A] and R_RD are those of the position
        scheme. Before the norm (pre_lnorm) memory and segment are normalised alike, and
        the residual adds the raw input; after it, the sum is normalised.
        """
        config = self.config
        dtype = config.compute_dtype
        D, H, A = config.d_model, config.n_head, config.d_head

        def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
            return self.param(name, weight(config, letters), shape).astype(dtype)

        norm = layer_norm(config, name="norm")
        query_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        kept: Any
        if isinstance(layer, (KeyValues, RingLayer)):
            qkv_DJHA = make("qkv", "D.HA", (D, 3, H, A))
            o_PHAC = make("o", ".HA.", (2, H, A, D // 2))
            qkv_BLJHA = jnp.einsum("BLD,DJHA->BLJHA", query_BLD, qkv_DJHA)
            q_BLHA, k_BLHA, v_BLHA = (qkv_BLJHA[:, :, j] for j in range(3))
        else:
            # D last in all of them: a TPU pads the last dimension to 128, and A is 64.
            q_HAD, k_HAD, v_HAD = (make(name, "HAD", (H, A, D)) for name in "qkv")
            o_PHAC = make("o", "HAD", (H, A, D))[None]
            q_BLHA = jnp.einsum("BLD,HAD->BLHA", query_BLD, q_HAD)

        def project(h_BKD: Array) -> tuple[Array, Array]:
            if config.pre_lnorm:  # what is in the memory trains the norm
                return key_values(norm(h_BKD), k_HAD, v_HAD)
            return key_values(h_BKD, k_HAD, v_HAD, h_BKD.shape[1] - h_BLD.shape[1])

        if isinstance(layer, RingLayer):
            o_BLHA, kept = layer.attend(q_BLHA, k_BLHA, v_BLHA, oldest_BL[:, 0])
        else:
            if isinstance(layer, KeyValues):
                k_BKHA, v_BKHA = layer.extend(k_BLHA, v_BLHA)
                kept, position = (k_BKHA, v_BKHA), layer.position(k_BKHA.shape[1])
            else:
                k_BKHA, v_BKHA = Memory.extend(layer, h_BLD, project)
                kept = h_BLD
                position = scores(config, make, R_RD, biases, k_BKHA.shape[1])
            dropout = None
            if config.dropatt and self.has_rng("dropout"):
                dropout = xla.Dropout(config.dropatt, seed(self))
            kernel = choose_kernel(config.kernel, q_BLHA)
            o_BLHA = kernel(q_BLHA, k_BKHA, v_BKHA, *position, oldest_BL, dropout)
        # As one contracted dimension: of two, XLA:CPU would copy the weights into the
        # order that it prefers, which takes a decoder as long as the product.
        P, C = o_PHAC.shape[0], o_PHAC.shape[3]
        o_BLX = o_BLHA.reshape(*o_BLHA.shape[:2], H * A)
        o_PBLX = jnp.broadcast_to(o_BLX, (P, *o_BLX.shape))
        out_BLPC = jnp.einsum("PBLX,PXC->BLPC", o_PBLX, o_PHAC.reshape(P, H * A, C))
        out_BLD = out_BLPC.reshape(h_BLD.shape)
        sum_BLD = h_BLD + Dropout(config.dropout, config.variational)(out_BLD)
        return (sum_BLD if config.pre_lnorm else norm(sum_BLD)), kept
