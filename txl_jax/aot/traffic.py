"""The bytes that a compiled program moves: between devices, and from and to HBM.

In HBM traffic a fusion counts the parts of its inputs that it reads, and its result.
Arrays in on-chip memory are not counted, and an operand of a Pallas kernel counts once.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from txl_jax.aot.hlo import Computation, Op, Program

# Slices exchange arrays through the hosts, as sends that this runtime carries out.
CROSS_SLICE = "cross-slice"
RUNTIME = "xla_megascale_runtime"
KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()


class Collective(NamedTuple):
    """One exchange of an array between devices.

    bytes: the size of the full array, a gather's result or a scatter's input.
    group: the devices of the first group, by their index in the mesh.
    """

    kind: str
    bytes: int
    group: tuple[int, ...]
    times: float
    path: str  # see Op.path


def collectives(program: Program) -> list[Collective]:
    """Returns all collectives; an asynchronous one is returned once."""
    result, seen = [], set()
    for op, _, times in program.visit():
        fused = list(program.inside(op)) if op.kind == "fusion" else []
        for inner, where in [(op, ""), *fused]:
            kind = inner.kind.removesuffix("-start")
            if kind == "send" and RUNTIME in inner.text:
                sent = inner.arrays[0].bytes
                result.append(Collective(CROSS_SLICE, sent, (0,), times, inner.path))
            if kind not in KINDS:
                continue
            chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', inner.text)
            if chain and chain.groups() in seen:
                continue
            seen |= {chain.groups()} if chain else set()
            result.append(_collective(kind, inner, where, times))
    return result


def _collective(kind: str, op: Op, where: str, times: float) -> Collective:
    sizes = [array.bytes for array in op.arrays]
    size = sum(sizes)
    if op.kind in ("all-gather-start", "collective-permute-start"):
        size = max(sizes)
    group = first_group(op.text)
    if kind == "reduce-scatter":
        size *= len(group)
    if where.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    return Collective(kind, size, group, times, op.path)


def first_group(text: str) -> tuple[int, ...]:
    """Returns the devices of the first group of a collective.

    The compiler writes a group as a list; as a transposed range of all devices,
    "[32,8]<=[256]" or "[8,32]<=[32,8]T(1,0)"; or by the axes of a mesh,
    "mesh['a'=32,'b'=8] {'b'}", whose devices may again be a transposed range,
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}".
    """
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)", text):
        return int(pair[1]), int(pair[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return _integers(listed[1])
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(rf"replica_groups=\[([\d,]+)\]<={iota}", text):
        return tuple(_range(match[2], match[3])[: _integers(match[1])[-1]].tolist())
    mesh_of = rf"mesh\[([^\]]*)\](?:, device_ids=\({iota}\))? \{{([^}}]*)\}}"
    if match := re.search(rf"replica_groups={mesh_of}", text):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", match[1])}
        devices = _range(match[2] or str(math.prod(sizes.values())), match[3])
        inside = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[4])]
        outside = [axis for axis in range(len(sizes)) if axis not in inside]
        groups = devices.reshape(*sizes.values()).transpose(outside + inside)
        count = math.prod(groups.shape[: len(outside)])
        return tuple(groups.reshape(count, -1)[0].tolist())
    if written := re.search(r"replica_groups=.{,60}", text):
        raise ValueError(f"unknown format of replica groups: {written[0]}")
    return (0,)


def _range(dims: str, order: str | None) -> np.ndarray:
    """Returns the devices of a transposed range such as "[2,4]T(1,0)"."""
    sizes = _integers(dims)
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return places.transpose(_integers(order) if order else None).ravel()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


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
    if op.kind == "custom-call" and "__cublas" in op.text:
        return sum(inputs) + op.arrays[0].bytes  # the second is a workspace
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
