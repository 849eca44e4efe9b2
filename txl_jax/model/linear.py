"""A linear layer whose product takes the device's fast form."""

import flax.linen as nn
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
        return y_BLY + bias_Y.astype(dtype)
