"""Linear layers in the fast form of a device (`kernels.product`)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.product import product
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import initial, normal


class Linear(nn.Module):
    """A linear layer, an einsum of features and a kernel such as BLD,DF->BLF.

    letters: the dimensions of the kernel; "." leaves one unnamed.
    """

    config: ModelConfig
    subscripts: str
    shape: tuple[int, int]
    letters: str
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BLX: Array) -> Array:
        """Returns the features y_BLY, in compute_dtype."""
        kernel = self.param("kernel", initial(self.config, self.letters), self.shape)
        dtype = self.config.compute_dtype
        y_BLY = product(self.subscripts, x_BLX.astype(dtype), kernel.astype(dtype))
        if not self.use_bias:
            return y_BLY
        target = self.subscripts[-1]
        bias_Y = self.param("bias", normal(0, target), y_BLY.shape[-1:])
        return add_bias(y_BLY, bias_Y.astype(dtype))


@jax.custom_vjp
def add_bias(y_BLY: Array, bias_Y: Array) -> Array:
    """Returns y + bias, whose gradient is summed in float32.

    In bfloat16 it would be inexact, and on a CPU such sums took 7 to 30 % of a step.
    """
    return y_BLY + bias_Y


def _backward(_: None, grad_BLY: Array) -> tuple[Array, Array]:
    return grad_BLY, jnp.sum(grad_BLY, axis=(0, 1))  # accumulated in float32


add_bias.defvjp(lambda y_BLY, bias_Y: (y_BLY + bias_Y, None), _backward)
