"""Multi-head attention over memory and segment (sections 3.2 and 3.3).

Dims: J = 3 of q, k and v, P = 2 parts of o, of C = D / 2 columns each.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.dispatch import choose_kernel
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.kernels.product import product
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, seed
from txl_jax.model.gate import add_residual
from txl_jax.model.initializers import Layout, feature_norm, head_norm, maker
from txl_jax.model.memory.key_values import join_heads, project_all
from txl_jax.model.memory.protocol import Kept, LayerMemory
from txl_jax.model.positions import position_terms, rotate_queries_and_keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(h_BKD: Array, x_HAD: Array, n_constant: int) -> Array:
    """Returns keys or values, x_BKHA.

    The first n_constant states, the memory's, get no gradient: the backward pass omits
    their product.
    """
    return product("BKD,HAD->BKHA", h_BKD, x_HAD)


def _forward(
    h_BKD: Array, x_HAD: Array, n_constant: int
) -> tuple[Array, tuple[Array, Array]]:
    return project(h_BKD, x_HAD, n_constant), (h_BKD, x_HAD)


def _backward(
    n_constant: int, saved: tuple[Array, Array], grad_BKHA: Array
) -> tuple[Array, Array]:
    h_BKD, x_HAD = saved
    grad_BLD = product("BLHA,HAD->BLD", grad_BKHA[:, n_constant:], x_HAD)
    grad_BKD = jnp.pad(grad_BLD, ((0, 0), (n_constant, 0), (0, 0)))
    return grad_BKD, product("BKHA,BKD->HAD", grad_BKHA, h_BKD)


project.defvjp(_forward, _backward)


class Attention(nn.Module):
    """The attention sublayer: projections, kernel, output, residual and LayerNorm."""

    config: ModelConfig
    layout: Layout = "stacked"

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        layer: LayerMemory,
        oldest_BL: Array,
        biases: dict[str, Array] | None = None,
        R_RD: Array | None = None,
    ) -> tuple[Array, Kept]:
        """Returns (h_BLD after the sublayer, what the layer's memory keeps).

        biases [H, A] and R_RD belong to the position scheme; None if the memory has the
        position terms. With pre_lnorm, memory and segment are normalized and the
        residual adds the raw input; otherwise the sum is normalized.
        """
        config = self.config
        make = maker(self)
        D, H, A = config.d_model, config.n_head, config.d_head
        norm = feature_norm(config, name="norm")
        is_separate = self.layout == "separate"
        if is_separate:
            qkv_DJHA = make("qkv", "DJHA", (D, 3, H, A))
            o_PHAC = make("o_halves", "PHAC", (2, H, A, D // 2))
        else:
            # D is last in each matrix: TPUs pad the last dimension to 128, and A is 64.
            q_HAD, k_HAD, v_HAD, o_HAD = (
                make(name, "HAD", (H, A, D)) for name in "qkvo"
            )

        # Equation 2: queries come from the segment, keys and values also from memory.
        h_BKD, n_constant = h_BLD, 0
        if (before := layer.before(h_BLD)) is not None:
            h_BMD, n_constant = before
            h_BKD = jnp.concatenate([h_BMD.astype(h_BLD.dtype), h_BLD], axis=1)
        x_BKD, x_BLD = h_BKD, h_BLD
        if config.pre_lnorm:  # the norm gets a gradient from the memory's keys
            x_BKD, n_constant = norm(h_BKD), 0
            x_BLD = x_BKD[:, -h_BLD.shape[1] :]
        if is_separate:
            # The memory holds keys and values: only the segment is projected, K = L.
            q_BLHA, k_BKHA, v_BKHA = project_all(x_BLD, qkv_DJHA)
        else:
            q_BLHA = product("BLD,HAD->BLHA", x_BLD, q_HAD)
            k_BKHA = project(x_BKD, k_HAD, n_constant)
            v_BKHA = project(x_BKD, v_HAD, n_constant)
        q_BLHA = checkpoint_name(q_BLHA, "q")
        k_BKHA, v_BKHA = checkpoint_name(k_BKHA, "k"), checkpoint_name(v_BKHA, "v")
        q_BLHA = head_norm(config, "q_norm")(q_BLHA)
        k_BKHA = head_norm(config, "k_norm")(k_BKHA)

        position = PositionTerms()
        if biases is not None:
            position = position_terms(config, make, R_RD, biases, k_BKHA.shape[1])
        dropout = None
        if config.dropatt and self.has_rng("dropout"):
            dropout = AttentionDropout(config.dropatt, seed(self))
        own = Operands(q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout)
        o_BLHA, kept = layer.attend(own, h_BKD, x_BKD, self._attend_in_order)

        if is_separate:
            out_BLD = join_heads(o_BLHA, o_PHAC)
        else:
            out_BLD = product("BLHA,HAD->BLD", o_BLHA, o_HAD)
        out_BLD = Dropout(config.dropout, config.variational)(out_BLD)
        return add_residual(config, norm, h_BLD, out_BLD), kept

    def _attend_in_order(self, operands: Operands) -> Array:
        """Returns o_BLHA, given keys in the order of time, not yet rotated."""
        return self.run_kernel(rotate_queries_and_keys(self.config, operands))

    def run_kernel(self, operands: Operands) -> Array:
        """Returns the kernel's o_BLHA; attention maps intercept this call."""
        return choose_kernel(self.config.kernel, operands)(operands)
