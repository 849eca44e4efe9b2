"""Biases, whose gradients are sums over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import tiny
from txl_jax.model.linear import add_bias


def test_the_gradient_of_a_bias_is_summed_in_float32() -> None:
    """Summed in bfloat16, 4,096 equal gradients would stop growing at 256 of them."""
    y_BLY = jnp.zeros((8, 512, 3), jnp.bfloat16)
    bias_Y = jnp.arange(3, dtype=jnp.bfloat16)
    z_BLY, pull = jax.vjp(add_bias, y_BLY, bias_Y)
    assert (z_BLY == bias_Y).all()
    grad_BLY = np.random.default_rng(0).normal(1, 0.1, y_BLY.shape)
    grad_y_BLY, grad_Y = pull(grad_BLY.astype(jnp.bfloat16))
    assert (grad_y_BLY == grad_BLY.astype(jnp.bfloat16)).all()
    assert grad_Y.dtype == jnp.bfloat16
    expected_Y = grad_BLY.sum(axis=(0, 1))
    tiny.assert_close(np.asarray(grad_Y, float), expected_Y, tiny.BFLOAT16)
