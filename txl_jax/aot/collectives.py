"""The collectives of a compiled program, and the bytes that they exchange."""

import math
import re
from typing import NamedTuple

from txl_jax.aot.hlo import Op, Program

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
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", text):
        numbers = re.findall(r"\d+", pairs[1])
        return (int(numbers[0]), int(numbers[1]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, listed[1].split(",")))
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(rf"replica_groups=\[([\d,]+)\]<={iota}", text):
        size = int(match[1].split(",")[-1])
        return tuple(_range(match[2], match[3])[:size])
    pattern = (
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({iota}\))? \{{([^}}]*)\}}"
    )
    if mesh := re.search(pattern, text):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        dims, names = list(sizes.values()), list(sizes)
        last = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        first = [n for n in range(len(dims)) if n not in last]
        places = _transposed(dims, first + last)[: math.prod(dims[n] for n in last)]
        devices = _range(mesh[2] or str(math.prod(dims)), mesh[3])
        return tuple(devices[place] for place in places)
    if written := re.search(r"replica_groups=.{,60}", text):
        raise ValueError(f"unknown format of replica groups: {written[0]}")
    return (0,)


def _range(dims: str, order: str | None) -> list[int]:
    """Returns the devices of a transposed range such as "[2,4]T(1,0)"."""
    sizes = [int(size) for size in dims.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else range(len(sizes))
    return _transposed(sizes, list(axes))


def _transposed(dims: list[int], order: list[int]) -> list[int]:
    """Returns 0, 1, .. in shape `dims`, transposed by `order` and flattened."""
    places = [0]
    for axis in order:
        step = math.prod(dims[axis + 1 :])
        places = [place + step * n for place in places for n in range(dims[axis])]
    return places
