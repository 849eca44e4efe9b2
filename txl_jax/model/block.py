"""One layer: attention, then the feed-forward (section 3.3, last equations)."""

import flax.linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.model.attention import Attention
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout
from txl_jax.model.fast_weights import LayerWeights
from txl_jax.model.initializers import feature_norm, maker
from txl_jax.model.interval import Call
from txl_jax.model.linear import Linear
from txl_jax.model.memory import LayerMemory
from txl_jax.model.positions import SCHEMES
from txl_jax.model.residual import add_residual

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
