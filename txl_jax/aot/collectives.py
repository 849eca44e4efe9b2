"""The collectives of a compiled program, and the bytes that they exchange."""

import math
import re
from typing import NamedTuple

import numpy as np

from txl_jax.aot.hlo import Op, Program

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
