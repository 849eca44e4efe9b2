"""Inputs on which every kernel is compared with `xla`, value and gradients.

Dims: B streams, L queries, M memory, K = M + L keys, R = K distances, H heads, A head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels.hash import Dropout
from txl_jax.kernels.signature import Kernel

B, H, A = 2, 2, 5
NAMES = (
    "q_BLHA",
    "k_BKHA",
    "v_BKHA",
    "r_RHA",
    "u_HA",
    "w_HA",
    "bias_HR",
    "oldest_BL",
    "dropout",
)

# What raises the oldest key, query i of stream b: numbers of keys, i + M being the own.
OLDEST: dict[str, Callable[[Array, Array, int], Array]] = {
    "everything": lambda b, i, M: 0 * (b + i),
    "filling": lambda b, i, M: M * (b + 1) // (b + 2) + 0 * i,
    "empty": lambda b, i, M: M + 0 * (b + i),
    "same_length": lambda b, i, M: i + (M > 0) + 0 * b,
    "documents": lambda b, i, M: np.where(i > b + 1, M + b + 2, M // 2 * b),
    "itself": lambda b, i, M: i + M + 0 * b,
}


def make_inputs(
    L: int, M: int, oldest: str = "everything", seed: int = 0, B: int = B, H: int = H
) -> dict[str, Any]:
    """Returns a kernel's inputs, all exact in bfloat16, and so are q + u and q + w."""
    rng = np.random.default_rng(seed)

    def quarters(*shape: int) -> Array:
        values = (np.clip(rng.normal(size=shape), -2, 2) * 4).round() / 4
        return values.astype(np.float32)

    b, i = np.ogrid[:B, :L]
    return {
        "q_BLHA": quarters(B, L, H, A),
        "k_BKHA": quarters(B, M + L, H, A),
        "v_BKHA": quarters(B, M + L, H, A),
        "r_RHA": quarters(M + L, H, A),
        "u_HA": quarters(H, A),
        "w_HA": quarters(H, A),
        "bias_HR": quarters(H, M + L),
        "oldest_BL": OLDEST[oldest](b, i, M).astype(np.int32),
    }


def cast(inputs: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Returns the inputs with their floating point numbers in a dtype."""

    def change(x: Array) -> jax.Array:
        return jnp.asarray(x, x.dtype if x.dtype == np.int32 else dtype)

    return jax.tree.map(change, inputs)


def differentiate(
    kernel: Kernel, inputs: dict[str, Any], dropout: Dropout | None = None
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (o_BLHA, the gradients of a fixed weighting of it by every input)."""
    rng = np.random.default_rng(9)
    weight_BLHA = rng.integers(-4, 5, inputs["q_BLHA"].shape) / 4
    floats = {name: x for name, x in inputs.items() if name != "oldest_BL"}

    def both(floats: dict[str, Any], oldest_BL: Any, weight_BLHA: Any) -> Any:
        def run(floats: dict[str, Any]) -> jax.Array:
            inputs = floats | {"oldest_BL": oldest_BL, "dropout": dropout}
            return kernel(*(inputs[name] for name in NAMES))

        o_BLHA, pull = jax.vjp(run, floats)
        return o_BLHA, pull(weight_BLHA.astype(o_BLHA.dtype))[0]

    return tiny.jit(both)(floats, inputs["oldest_BL"], weight_BLHA)


def assert_agree(
    actual: tuple[jax.Array, dict[str, Any]],
    expected: tuple[jax.Array, dict[str, Any]],
    tolerance: float = tiny.FLOAT32,
) -> None:
    """Compares two results of `differentiate`, each array by its greatest number.

    Where every query sees one key, all gradients of scores are 0 but for rounding,
    which is relative to those that cancelled: the values'.
    """
    scale = np.abs(np.asarray(expected[1]["v_BKHA"], np.float64)).max()

    def with_scale(x: Any) -> Array:
        x = np.asarray(x, np.float64)
        return np.append(x, scale if np.abs(x).max() < 1e-5 * scale else 0)

    assert actual[0].dtype == actual[1]["q_BLHA"].dtype
    tiny.assert_close(
        jax.tree.map(with_scale, actual), jax.tree.map(with_scale, expected), tolerance
    )
