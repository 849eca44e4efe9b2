"""The installed XLA:CPU computes the sum over a product's squares correctly.

jaxlib 0.10.2 returns one wrong row (https://github.com/jax-ml/jax/issues/39103), which
is why setup.py excludes it. 0.10.1, 0.11.0 to 0.11.2, 0.12.0 and 0.12.0.1 pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROWS = 32_769  # the smallest number with which jaxlib 0.10.2 fails


@pytest.mark.exact_bits
def test_sums_of_squares_of_products_are_right() -> None:
    def squares(row_X: jax.Array) -> jax.Array:
        return jnp.sum((jnp.eye(3) @ row_X) ** 2)

    row_YX = jnp.zeros((ROWS, 3)).at[:, 0].set(jnp.arange(ROWS))
    actual_Y = jax.jit(jax.vmap(squares))(row_YX)
    expected_Y = np.arange(ROWS, dtype=np.float32) ** 2
    np.testing.assert_array_equal(actual_Y, expected_Y)
