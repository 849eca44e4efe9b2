"""The end of a sublayer: residual, gate and norm."""

from collections.abc import Callable

import flax.linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import normal
from txl_jax.model.linear import Linear, add_bias

BIAS = 2.0  # the initial b: the gates start at z = s(-2) = 0.12


def add_residual(
    config: ModelConfig, norm: Callable[[Array], Array], x_BLD: Array, y_BLD: Array
) -> Array:
    """Returns x + y, or with model.gate the gate's g; normalized unless pre_lnorm.

    x is the input of a sublayer and y its output. The calling module holds the gate's
    parameters.
    """
    if config.gate == "none":
        sum_BLD = x_BLD + y_BLD
    else:
        sum_BLD = Gate(config, name="gru")(x_BLD, nn.relu(y_BLD))
    sum_BLD = checkpoint_name(sum_BLD, "sum")
    return sum_BLD if config.pre_lnorm else norm(sum_BLD)


class Gate(nn.Module):
    """A gated recurrent unit over depth (Parisotto et al. 2020, section 3.2).

    It lets a layer begin close to the identity, which reinforcement learning needs.
    With y the ReLU of the sublayer's output and s the logistic function,

        r = s(W_r y + U_r x)
        z = s(W_z y + U_z x - b)
        g = (1 - z) * x + z * tanh(W_g y + U_g (r * x)).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BLD: Array, y_BLD: Array) -> Array:
        """Returns g."""
        config, D = self.config, self.config.d_model

        def linear(name: str, x_BLD: Array) -> Array:
            shape = D, D
            layer = Linear(
                config, "BLD,DC->BLC", shape, "D.", use_bias=False, name=name
            )
            return layer(x_BLD)

        bias_D = self.param("bias", normal(0, "D", mean=BIAS), (D,))
        z_BLD = linear("W_z", y_BLD) + linear("U_z", x_BLD)
        z_BLD = nn.sigmoid(add_bias(z_BLD, -bias_D.astype(config.compute_dtype)))
        r_BLD = nn.sigmoid(linear("W_r", y_BLD) + linear("U_r", x_BLD))
        new_BLD = nn.tanh(linear("W_g", y_BLD) + linear("U_g", r_BLD * x_BLD))
        return (1 - z_BLD) * x_BLD + z_BLD * new_BLD
