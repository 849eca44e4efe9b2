"""Compares a kernel with the einsum on the attached device, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.kernels import xla
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Kernel, Operands, PositionTerms

# The largest error of an array by its largest element. Chips approximate exponentials;
# a wrong index, mask or tile is off by percents.
TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
# Several tiles, none of which is full.
B, L, M, H, A = 2, 136, 200, 2, 64


def fault(kernel: Kernel) -> str:
    """Returns what is wrong with a kernel on the first local device, "" if nothing.

    Stream 0 sees half of its memory, and a document begins inside stream 1. Errors of
    the compiler and of the device count as faults.
    """
    with jax.default_device(jax.local_devices()[0]):
        for dtype, tolerance in TOLERANCES.items():
            try:
                operands = _operands(dtype)
                actual = _differentiate(kernel, operands)
                expected = _differentiate(xla.rel_attention, operands)
            except Exception as error:  # the compilers of devices raise many types
                return f"{type(error).__name__}: {error}".splitlines()[0][:200]
            for name, right in expected.items():
                off = np.abs(actual[name] - right).max() / np.abs(right).max()
                if not off <= tolerance:  # NaN, too
                    return f"{name} is off by {off:.0%} of its largest element, {dtype}"
    return ""


def _operands(dtype: str) -> Operands:
    """Returns operands that are exact in bfloat16; u and w are float32."""
    rng = np.random.default_rng(0)
    sizes = {"B": B, "L": L, "K": M + L, "R": M + L, "H": H, "A": A}

    def draw(letters: str, dtype: str = dtype) -> Array:
        shape = [sizes[letter] for letter in letters]
        values = (rng.normal(size=shape).clip(-2, 2) * 4).round() / 4
        return jnp.asarray(values, dtype)

    position_L = np.arange(L)
    oldest_BL = np.stack([0 * position_L + M // 2, (position_L > 50) * (M + 51)])
    return Operands(
        draw("BLHA"),
        draw("BKHA"),
        draw("BKHA"),
        PositionTerms(draw("RHA"), draw("HA", "float32"), draw("HA", "float32")),
        jnp.asarray(oldest_BL, jnp.int32),
        AttentionDropout(0.1, jnp.uint32(7), 5, 3),
    )


def _differentiate(kernel: Kernel, operands: Operands) -> dict[str, np.ndarray]:
    """Returns the output and the gradients of a weighting of it, in float64."""

    def run(operands: Operands) -> tuple[Array, Array]:
        o_BLHA = kernel(operands)
        weight_BLHA = jnp.cos(jnp.arange(o_BLHA.size)).reshape(o_BLHA.shape)
        return (o_BLHA * weight_BLHA).sum(), o_BLHA

    with jax.default_matmul_precision("highest"):
        grad = jax.grad(run, has_aux=True, allow_int=True)
        gradients, o_BLHA = jax.jit(grad)(operands)
    result = {"o": o_BLHA}
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        if gradient.dtype != jax.dtypes.float0:  # that of integers
            result[f"the gradient of {path[-1].name}"] = gradient
    return {name: np.asarray(x, np.float64) for name, x in result.items()}
