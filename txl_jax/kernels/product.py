"""Matrix products as einsums of two arrays, each of whose letters occurs twice.

XLA:CPU multiplies bfloat16 matrices fast (AMX, AVX-512 BF16) if the result is float32,
the left operand has the contracted dimensions last, and no layout is transposed. On a
CPU, products of bfloat16 matrices and their gradients get this form. Products with a
vector do not: in generation, the plain form is almost twice as fast.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from txl_jax.kernels.sharded import split_mesh, target_device

Pair = tuple[Array, Array]


def product(subscripts: str, x: Array, y: Array) -> Array:
    """Returns an einsum in the operands' dtype."""
    if is_fast(subscripts, x, y):
        return fast_product(subscripts, x, y).astype(x.dtype)
    return jnp.einsum(subscripts, x, y)


def float32_product(subscripts: str, x: Array, y: Array) -> Array:
    """Returns an einsum accumulated in float32."""
    if is_fast(subscripts, x, y):
        return fast_product(subscripts, x, y)
    if split_mesh(x) and target_device().platform == "cpu":  # lacks some in bfloat16
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def is_fast(subscripts: str, x: Array, y: Array) -> bool:
    """Returns whether two matrices are bfloat16 on one CPU device."""
    a, b, _ = re.split(",|->", subscripts)
    sizes = dict(zip(a + b, x.shape + y.shape, strict=True))
    rows, columns = (math.prod(sizes[c] for c in z) for z in ({*a} - {*b}, {*b} - {*a}))
    is_short = x.dtype == y.dtype == jnp.bfloat16 and min(rows, columns) > 1
    is_split = split_mesh(x) or split_mesh(y)
    return is_short and not is_split and target_device().platform == "cpu"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0, inline=True)  # layouts need tracing
def fast_product(subscripts: str, x: Array, y: Array) -> Array:
    """Returns the einsum in float32; its gradients have the operands' dtype."""
    a, b, out = re.split(",|->", subscripts)
    shared = {*a} & {*b}
    batch = [c for c in out if c in shared]
    inner = [c for c in a if c in shared and c not in out]

    def order(names: str, last: list[str]) -> str:
        return "".join([*batch, *(c for c in names if c not in shared), *last])

    # If one operand must be transposed, it is the smaller one.
    if a != order(a, inner) and (b == order(b, inner) or x.size > y.size):
        a, b, x, y = b, a, y, x
    left = order(a, inner)
    x, y = pin(jnp.einsum(f"{a}->{left}", x)), pin(y)
    contracted, batched = (
        ([left.index(c) for c in s], [b.index(c) for c in s]) for s in (inner, batch)
    )
    dims = contracted, batched
    result = jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
    return jnp.einsum(f"{order(a + b, [])}->{out}", pin(result))


def pin(x: Array) -> Array:
    """Returns x in the layout of its dimensions, which the compiler cannot split.

    Otherwise XLA:CPU folds a transpose into the product, which is slow or fails.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _backward(subscripts: str, saved: Pair, grad: Array) -> Pair:
    (x, y), grad = saved, grad.astype(saved[0].dtype)
    a, b, out = re.split(",|->", subscripts)
    grad_x = fast_product(f"{out},{b}->{a}", grad, y)
    grad_y = fast_product(f"{out},{a}->{b}", grad, x)
    return grad_x.astype(x.dtype), grad_y.astype(y.dtype)


fast_product.defvjp(lambda s, x, y: (fast_product(s, x, y), (x, y)), _backward)
