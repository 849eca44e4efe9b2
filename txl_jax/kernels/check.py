"""Compares a kernel with the einsum on the attached device, forward and backward."""

from typing import Any, NamedTuple

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


class Inputs(NamedTuple):
    """The arrays of a kernel that have gradients; u and w are float32."""

    q_BLHA: Array
    k_BKHA: Array
    v_BKHA: Array
    r_RHA: Array
    u_HA: Array
    w_HA: Array


def fault(kernel: Kernel) -> str:
    """Returns what is wrong with a kernel on the first local device, "" if nothing.

    Stream 0 sees half of its memory, and a document begins inside stream 1. Errors of
    the compiler and of the device count as faults.
    """
    position_L = np.arange(L)
    oldest_BL = np.stack([0 * position_L + M // 2, (position_L > 50) * (M + 51)])
    with jax.default_device(jax.local_devices()[0]):
        for dtype, tolerance in TOLERANCES.items():
            try:
                args = _inputs(dtype), jnp.asarray(oldest_BL, jnp.int32)
                actual = _differentiate(kernel, *args)
                expected = _differentiate(xla.rel_attention, *args)
            except Exception as error:  # the compilers of devices raise many types
                return f"{type(error).__name__}: {error}".splitlines()[0][:200]
            for name, right in expected.items():
                off = np.abs(actual[name] - right).max() / np.abs(right).max()
                if not off <= tolerance:  # NaN, too
                    return f"{name} is off by {off:.0%} of its largest element, {dtype}"
    return ""


def _inputs(dtype: str) -> Inputs:
    """Returns inputs that are exact in bfloat16."""
    rng = np.random.default_rng(0)
    sizes = {"B": B, "L": L, "K": M + L, "R": M + L, "H": H, "A": A}

    def draw(name: str) -> Array:
        shape = [sizes[letter] for letter in name.rpartition("_")[2]]
        values = (rng.normal(size=shape).clip(-2, 2) * 4).round() / 4
        return jnp.asarray(values, "float32" if name in ("u_HA", "w_HA") else dtype)

    return Inputs(*map(draw, Inputs._fields))


def _differentiate(
    kernel: Kernel, inputs: Inputs, oldest_BL: Array
) -> dict[str, np.ndarray]:
    """Returns the output and the gradients of a weighting of it, in float64."""

    def run(x: Inputs, oldest_BL: Array) -> tuple[Array, Array]:
        dropout = AttentionDropout(0.1, jnp.uint32(7), 5, 3)
        position = PositionTerms(x.r_RHA, x.u_HA, x.w_HA)
        operands = Operands(x.q_BLHA, x.k_BKHA, x.v_BKHA, position, oldest_BL, dropout)
        o_BLHA = kernel(operands)
        weight_BLHA = jnp.cos(jnp.arange(o_BLHA.size)).reshape(o_BLHA.shape)
        return (o_BLHA * weight_BLHA).sum(), o_BLHA

    with jax.default_matmul_precision("highest"):
        gradients, o_BLHA = jax.jit(jax.grad(run, has_aux=True))(inputs, oldest_BL)
    result: dict[str, Any] = {"o": o_BLHA}
    result |= {f"the gradient of {k}": x for k, x in gradients._asdict().items()}
    return {name: np.asarray(x, np.float64) for name, x in result.items()}
