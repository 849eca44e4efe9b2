"""Multi-head attention over memory and segment (section 3.3).

Dims: B streams, L segment, M memory, K = M + L, R = K distances, D model, H heads,
A head.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import xla
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, seed
from txl_jax.model.initializers import normal, weight
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES, Distances

KERNELS = {"xla": xla.rel_attention}


def layer_norm(config: ModelConfig, name: str) -> nn.LayerNorm:
    """Returns LayerNorm over the features."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon,
        dtype=config.compute_dtype,
        use_fast_variance=False,
        scale_init=normal(config.norm_init_std, "D", mean=1.0),
        bias_init=normal(0, "D"),
        name=name,
    )


class Attention(nn.Module):
    """One attention sublayer: norm, projections, kernel, output and residual."""

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
        """Returns h_BLD after the sublayer; h_BMD is this layer's memory.

        biases [H, A] and R_RD are those of the position scheme. Before the norm
        (pre_lnorm) memory and segment are normalised alike, and the residual adds the
        raw input; after it, the sum is normalised.
        """
        config = self.config
        dtype = config.compute_dtype
        D, H, A = config.d_model, config.n_head, config.d_head

        def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
            return self.param(name, weight(config, letters), shape).astype(dtype)

        norm = layer_norm(config, "norm")
        q_DHA, k_DHA, v_DHA = (make(name, "DHA", (D, H, A)) for name in "qkv")
        o_HAD = make("o", "HAD", (H, A, D))

        def project(h_BKD: Array) -> tuple[Array, Array]:
            c_BKD = norm(h_BKD) if config.pre_lnorm else h_BKD
            k_BKHA = jnp.einsum("BKD,DHA->BKHA", c_BKD, k_DHA)
            v_BKHA = jnp.einsum("BKD,DHA->BKHA", c_BKD, v_DHA)
            return k_BKHA, v_BKHA

        query_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        k_BKHA, v_BKHA, _ = Memory.extend(h_BMD, h_BLD, project)
        scores, position = SCHEMES[config.position].scores, Distances()
        if scores:
            position = scores(config, make, R_RD, biases, k_BKHA.shape[1])
        dropout = None
        if config.dropatt and self.has_rng("dropout"):
            dropout = xla.Dropout(config.dropatt, seed(self))
        o_BLHA = KERNELS[config.kernel](
            jnp.einsum("BLD,DHA->BLHA", query_BLD, q_DHA),
            k_BKHA,
            v_BKHA,
            *position,
            oldest_BL,
            dropout,
        )
        out_BLD = jnp.einsum("BLHA,HAD->BLD", o_BLHA, o_HAD)
        sum_BLD = h_BLD + Dropout(config.dropout, config.variational)(out_BLD)
        return sum_BLD if config.pre_lnorm else norm(sum_BLD)
