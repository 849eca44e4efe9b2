"""Values and gradients of a kernel on made-up operands, for comparisons."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Kernel, Operands, PositionTerms

PERIOD = 2**18 - 5  # of random numbers in large arrays; odd, so that no rows repeat

Arrays = dict[str, np.ndarray]


def make_operands(
    shape: tuple[int, ...], dtype: str, absent: tuple[str, ...], rate: float = 0.1
) -> Operands:
    """Returns operands of B, H, L, M, A and R that are exact in bfloat16.

    Half of the memory of odd streams is empty, and a document begins inside them. The
    biases are float32. absent: the position terms that a score lacks; rate: dropout.
    """
    rng, sizes = np.random.default_rng(0), dict(zip("BHLMAR", shape, strict=True))
    L, M = sizes["L"], sizes["M"]
    sizes["K"] = M + L

    def draw(name: str, dtype: str) -> Array:
        size = [sizes[letter] for letter in name.partition("_")[2]]
        values = rng.normal(size=min(math.prod(size), PERIOD))
        values = (values.clip(-2, 2) * 4).round() / 4
        return jnp.asarray(np.resize(values, size), dtype)

    q_BLHA, k_BKHA, v_BKHA = (draw(name, dtype) for name in Operands._fields[:3])
    terms = {
        name: draw(name, dtype if name == "r_RHA" else "float32")
        for name in PositionTerms._fields
        if name not in absent
    }
    b_B1, i_L = np.arange(sizes["B"])[:, None], np.arange(L)
    oldest_BL = np.where(i_L >= L // 3, M + L // 3, M // 2) * (b_B1 % 2)
    dropout = AttentionDropout(rate, jnp.uint32(7), 5, 3) if rate else None
    position, oldest_BL = PositionTerms(**terms), oldest_BL.astype(np.int32)
    return Operands(q_BLHA, k_BKHA, v_BKHA, position, jnp.asarray(oldest_BL), dropout)


def differentiate(
    kernel: Kernel,
    operands: Operands,
    precision: str | None = "highest",
    backward: bool = True,
) -> Arrays:
    """Returns the arrays of `run_kernel` in float64.

    precision: the precision of products; None is the device's default.
    """
    with jax.default_matmul_precision(precision):
        result = run_kernel(kernel, operands, backward)
    return {name: np.asarray(x, np.float64) for name, x in result.items()}


@functools.partial(jax.jit, static_argnames=("kernel", "backward"))
def run_kernel(
    kernel: Kernel, operands: Operands, backward: bool = True
) -> dict[str, Array]:
    """Returns the output and, if backward, the gradients of a weighted sum of it."""

    def run(operands: Operands) -> tuple[Array, Array]:
        o_BLHA = kernel(operands)
        # Exact in bfloat16, like the operands.
        weight_BLHA = (jnp.arange(o_BLHA.size) % 11 / 4 - 1.25).reshape(o_BLHA.shape)
        return (o_BLHA * weight_BLHA).sum(), o_BLHA

    if not backward:
        return {"o": kernel(operands)}
    grad = jax.grad(run, has_aux=True, allow_int=True)
    gradients, o_BLHA = grad(operands)
    result = {"o": o_BLHA}
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        if gradient.dtype != jax.dtypes.float0:  # the dtype for integers
            result[f"the gradient of {path[-1].name}"] = gradient
    return result


def errors(actual: Arrays, expected: Arrays) -> dict[str, float]:
    """Returns each array's largest error relative to its maximum; inf for NaN.

    Relative to 1 if all of it is 0.
    """
    result = {}
    for name, right in expected.items():
        off = np.abs(actual[name] - right).max() / (np.abs(right).max() or 1.0)
        result[name] = float(off) if np.isfinite(off) else np.inf
    return result
