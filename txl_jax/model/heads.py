"""What attention's heads make of hidden states: keys and values (section 3.3).

Dims: B streams, L segment, K states of memory and segment, D model, H heads, A head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def key_values(
    h_BKD: Array, k_HAD: Array, v_HAD: Array, fixed: int = 0
) -> tuple[Array, Array]:
    """Returns keys and values of hidden states, normalised if they are to be.

    The first `fixed` of the K states get no gradient.
    """
    return project_heads(h_BKD, k_HAD, fixed), project_heads(h_BKD, v_HAD, fixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project_heads(h_BKD: Array, x_HAD: Array, fixed: int) -> Array:
    """Returns x_BKHA; the backward pass has no product for the first `fixed` states."""
    return jnp.einsum("BKD,HAD->BKHA", h_BKD, x_HAD)


def save(h_BKD: Array, x_HAD: Array, fixed: int) -> tuple[Array, tuple[Array, Array]]:
    """Returns `project_heads`, and what its gradients need."""
    return project_heads(h_BKD, x_HAD, fixed), (h_BKD, x_HAD)


def differentiate(
    fixed: int, saved: tuple[Array, Array], grad_BKHA: Array
) -> tuple[Array, Array]:
    """Returns the gradients of states and weights."""
    h_BKD, x_HAD = saved
    grad_BLD = jnp.einsum("BLHA,HAD->BLD", grad_BKHA[:, fixed:], x_HAD)
    grad_BKD = jnp.pad(grad_BLD, ((0, 0), (fixed, 0), (0, 0)))
    return grad_BKD, jnp.einsum("BKHA,BKD->HAD", grad_BKHA, h_BKD)


project_heads.defvjp(save, differentiate)
