"""One layer: attention over memory and segment, then the feed-forward (section 3)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.dispatch import choose_kernel
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.product import product
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastWeights, LayerWeights
from txl_jax.model.interval import Call
from txl_jax.model.memory import LayerMemory
from txl_jax.model.modules import (
    Dropout,
    Linear,
    add_residual,
    feature_norm,
    head_norm,
    maker,
    seed,
)
from txl_jax.model.positions import (
    SCHEMES,
    position_terms,
    rotate_queries_and_keys,
)


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
    """The attention sublayer: projections, kernel, output, residual and norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        memory: LayerMemory,
        biases: dict[str, Array],
        call: Call,
        R_RD: Array | None,
    ) -> tuple[Array, LayerWeights | None]:
        """Returns (h_BLD after the sublayer, the layer's new fast weights).

        biases [H, A] and R_RD belong to the position scheme. With pre_lnorm, memory and
        segment are normalized and the residual adds the raw input; otherwise the sum is
        normalized.
        """
        config, L, M = self.config, h_BLD.shape[1], memory.h_BMD.shape[1]
        make = maker(self)
        shape = config.n_head, config.d_head, config.d_model
        norm = feature_norm(config, name="norm")
        # D is last in each matrix: TPUs pad the last dimension to 128, and A is 64.
        q_HAD, k_HAD, v_HAD, o_HAD = (make(name, "HAD", shape) for name in "qkvo")

        # Equation 2: queries come from the segment, keys and values also from memory.
        h_BKD = jnp.concatenate([memory.h_BMD.astype(h_BLD.dtype), h_BLD], axis=1)
        x_BKD, x_BLD, n_constant = h_BKD, h_BLD, M
        if config.pre_lnorm:  # the norm's scale gets a gradient from the memory's keys
            x_BKD, n_constant = norm(h_BKD), 0
            x_BLD = x_BKD[:, -L:]
        q_BLHA = checkpoint_name(product("BLD,HAD->BLHA", x_BLD, q_HAD), "q")
        k_BKHA = checkpoint_name(project(x_BKD, k_HAD, n_constant), "k")
        v_BKHA = checkpoint_name(project(x_BKD, v_HAD, n_constant), "v")
        q_BLHA = head_norm(config, "q_norm")(q_BLHA)
        k_BKHA = head_norm(config, "k_norm")(k_BKHA)

        position = position_terms(config, make, R_RD, biases, k_BKHA.shape[1])
        dropout = None
        if config.dropatt and self.has_rng("dropout"):
            dropout = AttentionDropout(config.dropatt, seed(self))
        operands = Operands(q_BLHA, k_BKHA, v_BKHA, position, call.oldest_BL, dropout)
        o_BLHA = attend(config, operands)
        fast = None
        if memory.fast:
            left = k_BKHA[:, :L], v_BKHA[:, :L]
            o_BLHA, fast = FastWeights(config, name="fast")(
                o_BLHA, x_BKD, k_BKHA[:, -L:], left, memory.fast, call
            )
        out_BLD = product("BLHA,HAD->BLD", o_BLHA, o_HAD)
        out_BLD = Dropout(config.dropout, config.variational)(out_BLD)
        return add_residual(config, norm, h_BLD, out_BLD), fast


def attend(
    config: ModelConfig, operands: Operands, kernel: Kernel | None = None
) -> Array:
    """Returns o_BLHA of a kernel, by default the one that config.kernel names.

    For "xla" it is `xla.rel_attention`. No key is rotated yet.
    """
    operands = rotate_queries_and_keys(config, operands)
    return (kernel or choose_kernel(config.kernel))(operands)


# For gated feed-forwards; the GELU is approximated by tanh.
ACTIVATIONS = {"geglu": nn.gelu, "swiglu": nn.silu}


class FeedForward(nn.Module):
    """The position-wise sublayer: two linear layers with a ReLU, and the residual.

    With a gate (Shazeer 2020), the activation of a third layer multiplies the hidden
    features, and there is no ReLU.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, h_BLD: Array) -> Array:
        """Returns h_BLD after the sublayer."""
        config = self.config
        sizes = {"D": config.d_model, "F": config.hidden_size}

        def linear(name: str, letters: str) -> Linear:
            subscripts = f"BL{letters[0]},{letters}->BL{letters[1]}"
            shape = sizes[letters[0]], sizes[letters[1]]
            return Linear(config, subscripts, shape, letters, name=name)

        def drop(x: Array, relu: bool = False) -> Array:
            return Dropout(config.dropout, config.variational, relu)(x)

        norm = feature_norm(config, name="norm")
        x_BLD = norm(h_BLD) if config.pre_lnorm else h_BLD
        # `Dropout` applies the ReLU and names its result; without dropout, the backward
        # pass uses this one.
        x_BLF = checkpoint_name(linear("in", "DF")(x_BLD), "hidden")
        if config.gated:
            activation = ACTIVATIONS[config.feed_forward]
            gate_BLF = activation(linear("gate", "DF")(x_BLD))
            x_BLF = drop(gate_BLF * x_BLF)
        else:
            x_BLF = drop(x_BLF, relu=True)
        out_BLD = drop(linear("out", "FD")(x_BLF))
        return add_residual(config, norm, h_BLD, out_BLD)


class Block(nn.Module):
    """One layer; in training the body of a scan over layers."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        h_BLD: Array,
        memory: LayerMemory,
        biases: dict[str, Array],
        call: Call,
        R_RD: Array | None,
    ) -> tuple[Array, tuple[Array, LayerWeights | None]]:
        """Returns (the layer's output, (its input, its new fast weights)).

        For the arguments see `Attention`.
        """
        if make_inputs := SCHEMES[self.config.position].inputs:
            h_BLD += make_inputs(self.config, maker(self), h_BLD.shape[1])
        attention = Attention(self.config, name="attention")
        x_BLD, fast = attention(h_BLD, memory, biases, call, R_RD)
        return FeedForward(self.config, name="feed_forward")(x_BLD), (h_BLD, fast)
