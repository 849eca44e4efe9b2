"""The errors of the attention kernels on a device."""

from collections.abc import Iterator
from typing import Any

import jax

from txl_jax.kernels import check, dispatch, xla

# The position terms that a score lacks: `plan.TERMS`.
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


def measure(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the errors of a kernel by type: of its values and of all gradients.

    They are compared with those of the einsum on the CPU in float32. Distances are
    clamped only in evaluation, so their gradients, sums over all farther keys, are
    checked in float32 alone.
    """
    shape, absent = part["shape"], ABSENT[part["terms"]]
    with jax.default_device(jax.devices("cpu")[0]):
        operands = check.make_operands(shape, "float32", absent)
        expected = check.differentiate(xla.rel_attention, operands)
    kernel = dispatch.KERNELS[part["kernel"]]
    result: dict[str, Any] = {"errors": {}, "fault": ""}
    for name, tolerance in TOLERANCES.items():
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        operands = check.make_operands(shape, dtype, absent)
        precision = "highest" if name == "float32" else None
        actual = check.differentiate(kernel, operands, precision)
        errors = check.errors(actual, expected)
        result["errors"][name] = errors
        _, _, L, M, _, R = shape
        if R < M + L and name != "float32":
            errors = {"o": errors["o"]}
        worst = max(errors, key=lambda each: errors[each])
        if not errors[worst] <= tolerance:
            off = f"{worst} is off by {errors[worst]:.1e} of its greatest number"
            where = " ".join(filter(None, (str(shape), part["terms"])))
            result["fault"] = result["fault"] or f"{name} at {where}: {off}"
        yield result
