"""The projection of hidden states to keys or values (section 3.3).

Dims: B streams, L segment, K states of memory and segment, D model, H heads, A head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project_heads(h_BKD: Array, x_HAD: Array, fixed: int) -> Array:
    """Returns x_BKHA.

    The first `fixed` states get no gradient: the backward pass omits the product for a
    memory, whose gradient would be discarded.
    """
    return jnp.einsum("BKD,HAD->BKHA", h_BKD, x_HAD)


def _forward(
    h_BKD: Array, x_HAD: Array, fixed: int
) -> tuple[Array, tuple[Array, Array]]:
    return project_heads(h_BKD, x_HAD, fixed), (h_BKD, x_HAD)


def _backward(
    fixed: int, saved: tuple[Array, Array], grad_BKHA: Array
) -> tuple[Array, Array]:
    h_BKD, x_HAD = saved
    grad_BLD = jnp.einsum("BLHA,HAD->BLD", grad_BKHA[:, fixed:], x_HAD)
    grad_BKD = jnp.pad(grad_BLD, ((0, 0), (fixed, 0), (0, 0)))
    return grad_BKD, jnp.einsum("BKHA,BKD->HAD", grad_BKHA, h_BKD)


project_heads.defvjp(_forward, _backward)
