"""The bytes that a compiled program reads from HBM and writes to it.

A fusion counts the parts of its inputs that it reads, and its result. Arrays in
on-chip memory are not counted, and an operand of a Pallas kernel counts once.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping

from txl_jax.aot.collectives import KINDS
from txl_jax.aot.hlo import Computation, Op, Program

SLICES = ("dynamic-slice", "slice", "gather")
# Within a fusion, these read only what their users read.
VIEWS = ("bitcast", "copy")
# These move nothing, or their instructions are counted separately.
IDLE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "call", "conditional", "partition-id", "replica-id", "opt-barrier"),
}
# The parts of the model, by module and scope names.
SCOPES = re.compile(
    r"embedding\.embed|embedding\.nll|attention|feed_forward|memory|TransformerXL"
)


def hbm_bytes(program: Program) -> dict[str, float]:
    """Returns the bytes that one device moves, by `Op.path`."""
    total: dict[str, float] = defaultdict(float)
    for op, name, times in program.visit():
        if moved := _moved(program, op, program.computations[name]):
            total[program.purpose(name, op.name)] += times * moved
    return total


def by_scope(by_path: Mapping[str, float]) -> dict[str, float]:
    """Sums amounts by the innermost part of the model, in decreasing order.

    "layers" is activations passed between layers or kept for the backward pass;
    "update" is everything outside the model: the sum and norm of gradients, the
    optimizer and the guard; "unnamed" has no path.
    """
    total: dict[str, float] = defaultdict(float)
    for path, amount in by_path.items():
        *_, name = ["update" if path else "unnamed", *SCOPES.findall(path)]
        total["layers" if name == "TransformerXL" else name] += amount
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _moved(program: Program, op: Op, home: Computation) -> float:
    """Returns the bytes that one run of an instruction reads and writes."""
    inputs = [home.ops[name].bytes for name in op.operands if name in home.ops]
    if op.kind in IDLE or op.kind.endswith("-done"):
        return 0
    if op.kind == "custom-call" and "tpu_custom_call" not in op.text:
        return 0
    if op.kind in ("copy-start", "slice-start", "async-start"):
        moved = op.arrays[1 if op.kind == "slice-start" else 0]
        return moved.bytes * (any(inputs) + moved.in_hbm)
    if op.kind in SLICES:
        return (op.arrays[0].bytes if inputs[0] else 0) + op.bytes
    if op.kind == "dynamic-update-slice":
        return 2 * inputs[1] if op.bytes else 0
    if op.kind == "scatter":
        return 3 * inputs[-1]
    if op.kind == "fusion":
        name = op.called("calls")
        inner = program.computations[name]
        pairs = zip(inner.parameters, inputs, strict=False)
        reads = sum(min(_read(program, name, each.name), size) for each, size in pairs)
        return reads + min(_written(program, name, inner.root), op.bytes)
    return sum(inputs) + op.bytes


def _read(program: Program, name: str, array: str) -> float:
    """Returns the bytes of an array that a fusion reads; inf for the whole array."""
    total = 0.0
    for user in program.users(name).get(array, []):
        if user.kind in SLICES:
            total += user.arrays[0].bytes
        elif user.kind in VIEWS or _is_view(program, user):
            total += _read(program, name, user.name)
        elif user.kind == "fusion":
            inner = user.called("calls")
            parameters = program.computations[inner].parameters
            for parameter, operand in zip(parameters, user.operands, strict=False):
                if operand == array:
                    total += _read(program, inner, parameter.name)
        elif user.kind == "dynamic-update-slice" and user.operands[0] == array:
            pass  # written in place
        elif user.kind not in ("tuple", "custom-call", *KINDS):
            return math.inf
    return total


def _is_view(program: Program, op: Op) -> bool:
    """Returns whether a nested fusion only changes the layout of an array."""
    if op.kind != "fusion":
        return False
    inner = program.computations[op.called("calls")].ops.values()
    return all(each.kind in ("parameter", *VIEWS) for each in inner)


def _written(program: Program, name: str, array: str) -> float:
    """Returns the bytes that a fusion writes for an array of its result."""
    ops = program.computations[name].ops
    op = ops[array]
    if op.kind == "tuple":
        return sum(_written(program, name, operand) for operand in op.operands)
    if op.kind in ("parameter", "custom-call", *KINDS):
        return 0
    if op.kind == "bitcast":
        return _written(program, name, op.operands[0])
    if op.kind == "fusion":
        inner = op.called("calls")
        return _written(program, inner, program.computations[inner].root)
    if op.kind == "dynamic-update-slice":
        return sum(array.bytes for array in ops[op.operands[1]].arrays)
    return op.bytes
