"""Cases on which every kernel is compared with `xla`, value and gradients."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels import xla
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Kernel, Operands, PositionTerms

POSITION = PositionTerms._fields
ARRAYS = ("q_BLHA", "k_BKHA", "v_BKHA", *POSITION)

# The oldest key that query i of stream b sees; its own key is i + M.
OLDEST: dict[str, Callable[[Array, Array, int], Array]] = {
    "everything": lambda b, i, M: 0 * (b + i),
    "filling": lambda b, i, M: M * (b + 1) // (b + 2) + 0 * i,
    "empty": lambda b, i, M: M + 0 * (b + i),
    "same_length": lambda b, i, M: i + (M > 0) + 0 * b,
    # Several segments of 12 tokens in one call.
    "staircase": lambda b, i, M: np.maximum(M // 2 * b, i // 12 * 12),
    "documents": lambda b, i, M: np.where(i > b + 1, M + b + 2, M // 2 * b),
    "itself": lambda b, i, M: i + M + 0 * b,
    "random": lambda b, i, M: (7 * b + 5 * i * i + 3) % (i + M + 1),
}


class Case(NamedTuple):
    """The inputs of a kernel."""

    L: int
    M: int
    oldest: str = "everything"
    rate: float = 0.0  # the dropout rate
    absent: tuple[str, ...] = ()
    B: int = 2
    H: int = 2
    A: int = 5

    @property
    def dropout(self) -> AttentionDropout | None:
        """The dropout, for streams from 5 on and heads from 3 on."""
        return AttentionDropout(self.rate, jnp.uint32(7), 5, 3) if self.rate else None

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Returns the arrays; all, and q + u and q + w, are exact in bfloat16."""
        rng = np.random.default_rng(seed)
        sizes = self._asdict() | {"K": self.M + self.L, "R": self.M + self.L}
        inputs: dict[str, Any] = {}
        for name in ARRAYS:
            shape = [sizes[letter] for letter in name.rpartition("_")[2]]
            values = (np.clip(rng.normal(size=shape), -2, 2) * 4).round() / 4
            absent = name in self.absent
            inputs[name] = None if absent else values.astype(np.float32)
        b, i = np.ogrid[: self.B, : self.L]
        oldest_BL = OLDEST[self.oldest](b, i, self.M).astype(np.int32)
        return inputs | {"oldest_BL": oldest_BL}


def pack(inputs: dict[str, Any], dropout: AttentionDropout | None = None) -> Operands:
    """Returns the arrays as a kernel's operands."""
    position = PositionTerms(*(inputs[name] for name in POSITION))
    others = {name: x for name, x in inputs.items() if name not in POSITION}
    return Operands(**others, position=position, dropout=dropout)


def cast(inputs: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Returns the inputs with their floating point numbers in a dtype."""

    def change(x: Array) -> jax.Array:
        return jnp.asarray(x, x.dtype if x.dtype == np.int32 else dtype)

    return jax.tree.map(change, inputs)


def differentiate(
    kernel: Kernel, inputs: dict[str, Any], dropout: AttentionDropout | None = None
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (o_BLHA, the gradients of a weighted sum of it by every input)."""
    rng = np.random.default_rng(9)
    weight_BLHA = rng.integers(-4, 5, inputs["q_BLHA"].shape) / 4
    floats = {name: x for name, x in inputs.items() if name != "oldest_BL"}

    def both(floats: dict[str, Any], oldest_BL: Any, weight_BLHA: Any) -> Any:
        def run(floats: dict[str, Any]) -> jax.Array:
            return kernel(pack(floats | {"oldest_BL": oldest_BL}, dropout))

        o_BLHA, pull = jax.vjp(run, floats)
        return o_BLHA, pull(weight_BLHA.astype(o_BLHA.dtype))[0]

    return jax.jit(both)(floats, inputs["oldest_BL"], weight_BLHA)


@functools.cache
def oracle(case: Case) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the result of `differentiate` for the einsum kernel in float32."""
    return differentiate(xla.rel_attention, case.inputs(), case.dropout)


def assert_agree(
    actual: tuple[jax.Array, dict[str, Any]],
    expected: tuple[jax.Array, dict[str, Any]],
    tolerance: float = tiny.FLOAT32,
) -> None:
    """Compares two results of `differentiate`, relative to each array's maximum.

    If every query sees a single key, all gradients of scores are 0 but for rounding,
    which is relative to the gradients of the values.
    """
    scale = np.abs(np.asarray(expected[1]["v_BKHA"], np.float64)).max()

    def with_scale(x: Any) -> Array:
        x = np.asarray(x, np.float64)
        return np.append(x, scale if np.abs(x).max() < 1e-5 * scale else 0)

    assert actual[0].dtype == actual[1]["q_BLHA"].dtype
    tiny.assert_close(
        jax.tree.map(with_scale, actual), jax.tree.map(with_scale, expected), tolerance
    )


def check(
    kernel: Kernel, case: Case, dtype: Any = jnp.float32, tolerance: float = 0.0
) -> None:
    """Compares a kernel with the einsum kernel, value and gradients."""
    actual = differentiate(kernel, cast(case.inputs(), dtype), case.dropout)
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
    default = tiny.FLOAT32 if dtype == jnp.float32 else tiny.BFLOAT16
    assert_agree(actual, oracle(case), tolerance or default)
