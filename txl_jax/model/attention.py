"""Relative multi-head attention over memory and segment (section 3.3).

Dims: B streams, L segment, M memory, K = M + L, R = K distances, D model, H heads,
A head.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import xla
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory

KERNELS = {"xla": xla.rel_attention}


def normal(std: float, letters: str) -> Any:
    """Returns an initialiser N(0, std) that names its axes by their letters."""
    return nn.with_logical_partitioning(nn.initializers.normal(std), tuple(letters))


def layer_norm(config: ModelConfig, name: str) -> nn.LayerNorm:
    """Returns LayerNorm with epsilon 1e-5, the original PyTorch model's."""
    return nn.LayerNorm(
        epsilon=1e-5,
        dtype=config.compute_dtype,
        use_fast_variance=False,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("D",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("D",)),
        name=name,
    )


class RelAttention(nn.Module):
    """One attention sublayer: norm, projections, kernel, output and residual."""

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
    ) -> Array:
        """Returns h_BLD after the sublayer; h_BMD is this layer's memory.

        Before the norm (pre_lnorm) memory and segment are normalised alike, and the
        residual adds the raw input; after it, the sum is normalised.
        """
        config = self.config
        dtype = config.compute_dtype
        training = self.has_rng("dropout")
        D, H, A = config.d_model, config.n_head, config.d_head

        def weight(name: str, letters: str, shape: tuple[int, ...]) -> Array:
            init = normal(config.init_std, letters)
            return self.param(name, init, shape).astype(dtype)

        norm = layer_norm(config, "norm")
        q_DHA, k_DHA, v_DHA, r_DHA = (
            weight(name, "DHA", (D, H, A)) for name in ("q", "k", "v", "r")
        )
        o_HAD = weight("o", "HAD", (H, A, D))

        def project(h_BKD: Array) -> tuple[Array, Array]:
            c_BKD = norm(h_BKD) if config.pre_lnorm else h_BKD
            k_BKHA = jnp.einsum("BKD,DHA->BKHA", c_BKD, k_DHA)
            v_BKHA = jnp.einsum("BKD,DHA->BKHA", c_BKD, v_DHA)
            return k_BKHA, v_BKHA

        query_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        k_BKHA, v_BKHA, _ = Memory.extend(h_BMD, h_BLD, project)
        dropout = None
        if training and config.dropatt:
            seed = jax.random.bits(self.make_rng("dropout"), dtype=jnp.uint32)
            dropout = xla.Dropout(config.dropatt, seed)
        o_BLHA = KERNELS[config.kernel](
            jnp.einsum("BLD,DHA->BLHA", query_BLD, q_DHA),
            k_BKHA,
            v_BKHA,
            jnp.einsum("RD,DHA->RHA", R_RD, r_DHA),
            u_HA,
            w_HA,
            None,
            oldest_BL,
            dropout,
        )
        out_BLD = jnp.einsum("BLHA,HAD->BLD", o_BLHA, o_HAD)
        out_BLD = nn.Dropout(config.dropout, deterministic=not training)(out_BLD)
        sum_BLD = h_BLD + out_BLD
        return sum_BLD if config.pre_lnorm else norm(sum_BLD)
