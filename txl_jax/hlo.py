"""What a compiled program moves: read from its text, loops as often as they run.

The compiler's own totals count a loop's body once, however often it runs. Here every
computation is counted as often as it is called. A loop whose length depends on the data
(the softmax's visit to the tokens of a rare cluster) counts once, or as often as the
reader of the program assumes.

Dims: none.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "fsuc" for bits in (8, 16, 32, 64, 128)
}


class Array(NamedTuple):
    """A type in the text: its bytes, unpadded, and whether they are in HBM."""

    bytes: int
    in_hbm: bool


class Op(NamedTuple):
    """One instruction; arrays are its result's, flat."""

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str

    def called(self, attribute: str) -> str:
        """Returns the computation that an attribute (body, calls..) names, or ""."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.text)
        return found[1] if found else ""

    @property
    def path(self) -> str:
        """What of the model it is for: jax's named scopes and the operation, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def bytes(self) -> int:
        """What the result takes in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)


class Computation(NamedTuple):
    """A function of the program: its instructions by name, in order."""

    ops: dict[str, Op]
    root: str

    @property
    def parameters(self) -> list[Op]:
        """The parameters by number."""
        found = [op for op in self.ops.values() if op.kind == "parameter"]
        return sorted(
            found, key=lambda op: int(re.findall(r"parameter\((\d+)", op.text)[0])
        )


class Collective(NamedTuple):
    """Bytes that devices exchange: those of the whole array that one of them has.

    A gather's are of the result, a scatter's of what is scattered. group: the devices
    that take part with the first one, by their place in the mesh.
    """

    kind: str
    bytes: int
    group: tuple[int, ...]
    times: float
    op: str  # what of the model it is for


KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()


def arrays_of(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, a tuple's one after the other."""
    found = []
    for dtype, sizes, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text):
        if dtype in WIDTHS:
            size = math.prod(map(int, filter(None, sizes.split(","))))
            space = re.search(r"S\((\d+)\)", layout)
            in_hbm = space is None or space[1] == "0"
            found.append(Array(size * WIDTHS[dtype], in_hbm))
    return tuple(found)


def closing(text: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def parse_op(line: str) -> Op | None:
    """Returns the instruction on a line, if there is one."""
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    end = closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    call = re.match(r"\s*([\w\-]+)\(", line[end:])
    if not call:
        return None
    opens = end + call.end() - 1
    closes = closing(line, opens)
    operands = tuple(re.findall(r"%([\w.\-]+)", line[opens:closes]))
    # The operands stand in `text` too: a parameter's and a constant's are numbers.
    return Op(head[1], call[1], arrays_of(line[start:end]), operands, line[end:])


class Program:
    """A compiled program's computations, and how often each runs.

    assumed: by a part of its path (`Op.path`), how often a loop runs whose length
    depends on the data.
    """

    def __init__(self, text: str, assumed: Mapping[str, float] | None = None) -> None:
        self.assumed = assumed or {}
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        ops: dict[str, Op] = {}
        root = name = ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                ops, root, name = {}, "", head[2]
                self.entry = name if head[1] else self.entry
            elif line.startswith("}"):
                self.computations[name] = Computation(ops, root)
            elif op := parse_op(line):
                ops[op.name] = op
                root = op.name if line.lstrip().startswith("ROOT ") else root

    def trips(self, loop: Op) -> float:
        """Returns how often a loop's body runs; if that is in the data, as assumed."""
        condition = self.computations[loop.called("condition")]
        test = condition.ops[condition.root]
        limits = [condition.ops[name] for name in test.operands]
        for limit in limits:
            if limit.kind == "constant" and "direction=LT" in test.text:
                return max(int(re.findall(r"constant\((-?\d+)", limit.text)[0]), 0)
        found = (n for part, n in self.assumed.items() if part in loop.path)
        return next(found, 1)

    def visit(
        self, name: str = "", times: float = 1
    ) -> Iterator[tuple[Op, str, float]]:
        """Yields (instruction, its computation, how often it runs), fusions whole."""
        name = name or self.entry
        for op in self.computations[name].ops.values():
            yield op, name, times
            if op.kind == "while":
                yield from self.visit(op.called("body"), times * self.trips(op))
            elif op.kind == "call":
                yield from self.visit(op.called("to_apply"), times)
            elif op.kind == "conditional":
                names = re.search(r"branch_computations=\{([^}]*)\}", op.text)
                for branch in re.findall(r"[\w.\-]+", names[1] if names else ""):
                    yield from self.visit(branch, times)

    def inside(self, op: Op) -> Iterator[tuple[Op, str]]:
        """Yields the instructions of a fusion, and the name of what it calls."""
        name = op.called("calls")
        for inner in self.computations[name].ops.values() if name else ():
            yield inner, name
            yield from self.inside(inner)

    def collectives(self) -> list[Collective]:
        """Returns all collectives; one cut into pieces, to overlap, is one."""
        found, seen = [], set()
        for op, _, times in self.visit():
            fused = list(self.inside(op)) if op.kind == "fusion" else []
            for inner, where in [(op, ""), *fused]:
                kind = inner.kind.removesuffix("-start")
                if kind not in KINDS:
                    continue
                chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', inner.text)
                if chain and chain.groups() in seen:
                    continue
                seen |= {chain.groups()} if chain else set()
                found.append(self._collective(kind, inner, where, times))
        return found

    def _collective(self, kind: str, op: Op, where: str, times: float) -> Collective:
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

    def cycles(self) -> dict[str, float]:
        """Returns the cycles that the TPU compiler estimates, by `Op.path`.

        It states them for what XLA itself makes; for a Pallas kernel, a collective and
        a copy that goes on beside other work it states none.
        """
        found: dict[str, float] = defaultdict(float)
        for op, name, times in self.visit():
            if stated := re.search(r'"estimated_cycles":"(\d+)"', op.text):
                found[self._purpose(name, op.name)] += times * int(stated[1])
        return dict(found)

    def pallas_calls(self) -> dict[str, float]:
        """Returns how often each Pallas kernel runs, by `Op.path`."""
        found: dict[str, float] = defaultdict(float)
        for op, _, times in self.visit():
            if op.kind == "custom-call" and "tpu_custom_call" in op.text:
                found[op.path] += times
        return dict(found)

    def hbm_bytes(self) -> dict[str, float]:
        """Returns the bytes that one device reads from its HBM and writes to it.

        By what of the model they are for (`Op.path`). Of each fusion's inputs what it
        reads of them, and its result; what lies in a chip's own memories is not
        counted, nor is what a Pallas kernel reads twice.
        """
        found: dict[str, float] = defaultdict(float)
        for op, name, times in self.visit():
            if moved := self._moved(op, self.computations[name]):
                found[self._purpose(name, op.name)] += times * moved
        return found

    @functools.cache  # noqa: B019 - a program lives as long as its reading
    def _purpose(self, name: str, array: str) -> str:
        """Returns the path of an instruction, or of the first that has use for it."""
        if path := self.computations[name].ops[array].path:
            return path
        users = self._users(name).get(array, [])
        return next(filter(None, (self._purpose(name, op.name) for op in users)), "")

    def _moved(self, op: Op, home: Computation) -> float:
        inputs = [home.ops[name].bytes for name in op.operands if name in home.ops]
        if op.kind in IDLE or op.kind.endswith("-done"):
            return 0
        if op.kind == "custom-call" and "tpu_custom_call" not in op.text:
            return 0
        if op.kind in ("copy-start", "slice-start", "async-start"):
            moved = op.arrays[1 if op.kind == "slice-start" else 0]
            reads = moved.bytes if any(inputs) else 0
            return reads + (moved.bytes if moved.in_hbm else 0)
        if op.kind in ("dynamic-slice", "slice", "gather"):
            size = op.arrays[0].bytes
            return (size if inputs[0] else 0) + op.bytes
        if op.kind == "dynamic-update-slice":
            return 2 * inputs[1] if op.bytes else 0
        if op.kind == "scatter":
            return 3 * inputs[-1]
        if op.kind == "fusion":
            name = op.called("calls")
            inner = self.computations[name]
            read = sum(
                min(self._read(name, parameter.name), size)
                for parameter, size in zip(inner.parameters, inputs, strict=False)
            )
            return read + min(self._written(name, inner.root), op.bytes)
        return sum(inputs) + op.bytes

    @functools.cache  # noqa: B019 - a program lives as long as its reading
    def _users(self, name: str) -> dict[str, list[Op]]:
        users: dict[str, list[Op]] = {}
        for op in self.computations[name].ops.values():
            for operand in set(op.operands):
                users.setdefault(operand, []).append(op)
        return users

    def _read(self, name: str, array: str) -> float:
        """Returns how many bytes of an array of a fusion are read in it."""
        total = 0.0
        for user in self._users(name).get(array, []):
            if user.kind in ("dynamic-slice", "slice", "gather"):
                total += user.arrays[0].bytes
            elif user.kind in VIEWS or self._is_view(user):
                total += self._read(name, user.name)
            elif user.kind == "fusion":
                inner = user.called("calls")
                parameters = self.computations[inner].parameters
                total += sum(
                    self._read(inner, parameters[i].name)
                    for i, operand in enumerate(user.operands)
                    if operand == array
                )
            elif user.kind == "dynamic-update-slice" and user.operands[0] == array:
                total += 0  # written in place
            elif user.kind not in ("tuple", "custom-call", *KINDS):
                total += math.inf
        return total

    def _is_view(self, op: Op) -> bool:
        """Returns whether a fusion in a fusion only gives an array another layout."""
        if op.kind != "fusion":
            return False
        inner = self.computations[op.called("calls")].ops.values()
        return all(each.kind in ("parameter", *VIEWS) for each in inner)

    def _written(self, name: str, array: str) -> float:
        """Returns how many bytes a fusion writes to make an array that it returns."""
        ops = self.computations[name].ops
        op = ops[array]
        if op.kind == "tuple":
            return sum(self._written(name, operand) for operand in op.operands)
        if op.kind in ("parameter", "custom-call", *KINDS):
            return 0
        if op.kind == "bitcast":
            return self._written(name, op.operands[0])
        if op.kind == "fusion":
            inner = op.called("calls")
            return self._written(inner, self.computations[inner].root)
        if op.kind == "dynamic-update-slice":
            return sum(array.bytes for array in ops[op.operands[1]].arrays)
        return op.bytes


# What within a fusion is read no further than what is made of it.
VIEWS = ("bitcast", "copy")
# What moves nothing, or whose parts are counted by themselves.
IDLE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "call", "conditional", "partition-id", "replica-id", "opt-barrier"),
}


def first_group(text: str) -> tuple[int, ...]:
    """Returns the devices of the first group of a collective.

    They are written one by one, or as an arrangement of all ("[32,8]<=[256]", perhaps
    with "T(1,0)"), or by axes of a mesh ("mesh['a'=32,'b'=8] {'b'}"), whose devices may
    be such an arrangement too ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}").
    """
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", text):
        numbers = re.findall(r"\d+", pairs[1])
        return (int(numbers[0]), int(numbers[1]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, listed[1].split(",")))
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={iota}", text):
        size = int(found[1].split(",")[-1])
        return tuple(_transposed(found[2], found[3])[:size])
    pattern = (
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({iota}\))? \{{([^}}]*)\}}"
    )
    if mesh := re.search(pattern, text):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        chosen = re.findall(r"'(\w+)'", mesh[4])
        dims, names = list(sizes.values()), list(sizes)
        last = [names.index(name) for name in chosen]
        first = [n for n in range(len(dims)) if n not in last]
        places = _arranged(dims, first + last)[: math.prod(dims[n] for n in last)]
        devices = _transposed(mesh[2] or str(math.prod(dims)), mesh[3])
        return tuple(devices[place] for place in places)
    if written := re.search(r"replica_groups=.{,60}", text):
        raise ValueError(f"this libtpu writes groups of devices anew: {written[0]}")
    return (0,)


def _transposed(dims: str, order: str | None) -> list[int]:
    """Returns what "[2,4]T(1,0)" lists, given as its two parts."""
    sizes = [int(size) for size in dims.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else range(len(sizes))
    return _arranged(sizes, list(axes))


def _arranged(dims: list[int], order: list[int]) -> list[int]:
    """Returns 0, 1, .. laid out in `dims`, read with the axes in another order."""
    places = [0]
    for axis in order:
        step = math.prod(dims[axis + 1 :])
        places = [place + step * n for place in places for n in range(dims[axis])]
    return places
