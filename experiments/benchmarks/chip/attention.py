"""The errors of the attention kernels on a device.

Dims: R <= K distances.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.chip import oracle
from txl_jax.kernels import dispatch
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Kernel, Operands, PositionTerms

NAMES = ("q_BLHA", "k_BKHA", "v_BKHA", "r_RHA", "u_HA", "w_HA", "bias_HR")
# The inputs that a kernel lacks, by the terms of a score: `plan.TERMS`.
ABSENT = {
    "": ("bias_HR",),
    "shaw_biased": ("w_HA",),
    "alibi": ("r_RHA", "u_HA", "w_HA"),
    "none": ("r_RHA", "u_HA", "w_HA", "bias_HR"),
}
# The greatest error of an array by its greatest number. "default" is float32 with the
# device's own precision of products, which on TPUs and new GPUs is less.
# A chip may approximate exponentials; a wrong index or mask is off by percents.
TOLERANCES = {"float32": 1e-4, "default": 2e-2, "bfloat16": 2e-2}
DROPOUT = oracle.Dropout(0.1, 7, 5, 3)


def make_inputs(
    shape: list[int], terms: str = ""
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns a kernel's inputs and the output's gradient, all exact in bfloat16.

    Half of the memory of stream 0 is empty, and stream 1 begins a document.
    """
    B, H, L, M, A, R = shape
    rng = np.random.default_rng(0)
    sizes = {"B": B, "H": H, "L": L, "K": M + L, "A": A, "R": R}

    def draw(letters: str) -> np.ndarray:
        values = rng.normal(size=[sizes[letter] for letter in letters])
        return ((np.clip(values, -2, 2) * 4).round() / 4).astype(np.float32)

    names = [name for name in NAMES if name not in ABSENT[terms]]
    inputs = {name: draw(name.rpartition("_")[2]) for name in names}
    b_B1, i_L = np.arange(B)[:, None], np.arange(L)
    oldest_BL = np.where(b_B1 % 2 == 0, M // 2 + 0 * i_L, (i_L > L // 3) * (M + L // 3))
    return inputs | {"oldest_BL": oldest_BL.astype(np.int32)}, draw("BLHA")


def with_gradients(kernel: Kernel, dropout: AttentionDropout | None) -> Any:
    """Returns the jitted function from inputs and gradient to o and all gradients."""

    def both(inputs: dict[str, Any], do_BLHA: jax.Array) -> dict[str, jax.Array]:
        floats = {name: inputs[name] for name in NAMES if name in inputs}

        def run(floats: dict[str, Any]) -> jax.Array:
            arrays: list[Any] = [floats.get(name) for name in NAMES]
            q_BLHA, k_BKHA, v_BKHA, *terms = arrays
            position, oldest_BL = PositionTerms(*terms), inputs["oldest_BL"]
            return kernel(
                Operands(q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout)
            )

        o_BLHA, pull = jax.vjp(run, floats)
        gradients = pull(do_BLHA.astype(o_BLHA.dtype))[0]
        return {"o": o_BLHA} | {
            name.partition("_")[0]: x for name, x in gradients.items()
        }

    return jax.jit(both)


def place(inputs: dict[str, np.ndarray], do_BLHA: np.ndarray, dtype: str) -> Any:
    """Moves the inputs to the device; biases and integers keep their type."""

    def cast(name: str, x: np.ndarray) -> jax.Array:
        own = name in ("u_HA", "w_HA", "bias_HR", "oldest_BL")
        return jnp.asarray(x, x.dtype if own else dtype)

    return {name: cast(name, x) for name, x in inputs.items()}, jnp.asarray(do_BLHA)


def compare(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the greatest error of each array by its greatest number; inf for NaN."""

    def error(name: str) -> float:
        right = np.asarray(expected[name], np.float64)
        off = np.abs(np.asarray(actual[name], np.float64) - right).max()
        return float(off / np.abs(right).max()) if np.isfinite(off) else np.inf

    return {name: error(name) for name in expected}


def check(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the errors of a kernel by type: of its values and of all gradients.

    Distances are clamped only in evaluation, so their gradients, sums over all farther
    keys, are checked in float32 alone.
    """
    inputs, do_BLHA = make_inputs(part["shape"], part["terms"])
    expected = oracle.differentiate(inputs, do_BLHA, DROPOUT)
    rate, seed, *first = DROPOUT
    dropout = AttentionDropout(rate, jnp.uint32(seed), *first)
    kernel = dispatch.KERNELS[part["kernel"]]
    result: dict[str, Any] = {"errors": {}, "fault": ""}
    for name, tolerance in TOLERANCES.items():
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        highest = jax.default_matmul_precision("highest")
        with highest if name == "float32" else contextlib.nullcontext():
            run = with_gradients(kernel, dropout)
            errors = compare(run(*place(inputs, do_BLHA, dtype)), expected)
        result["errors"][name] = errors
        B, H, L, M, A, R = part["shape"]
        if R < M + L and name != "float32":
            errors = {"o": errors["o"]}
        worst = max(errors, key=lambda each: errors[each])
        if not errors[worst] <= tolerance:
            array = "values" if worst == "o" else f"the gradient of {worst}"
            off = f"{array} off by {errors[worst]:.1e} of its greatest number"
            where = " ".join(filter(None, (str(part["shape"]), part["terms"])))
            result["fault"] = result["fault"] or f"{name} at {where}: {off}"
        yield result
