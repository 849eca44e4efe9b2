"""Parses the text of a compiled program, with the trip counts of its loops.

The compiler's totals count the body of a loop once. A loop whose length depends on the
data, such as the softmax's over the tokens of a rare cluster, counts once here as well,
or as often as the caller assumes.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "fsuc" for bits in (8, 16, 32, 64, 128)
}


class Array(NamedTuple):
    """The type of an array: its unpadded bytes, and whether they are in HBM."""

    bytes: int
    in_hbm: bool


class Op(NamedTuple):
    """One instruction; `arrays` are the arrays of its result, flattened."""

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str  # after the result's type: operands and attributes

    def find(self, pattern: str) -> str:
        """Returns the group of a regular expression in the text, or ""."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""

    def called(self, attribute: str) -> str:
        """Returns the computation that an attribute (body, calls..) names, or ""."""
        return self.find(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def path(self) -> str:
        """The JAX scopes and operation that the instruction comes from, or ""."""
        return self.find(r'op_name="([^"]*)"')

    @property
    def bytes(self) -> int:
        """Bytes of the result in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)


class Computation(NamedTuple):
    """A function of the program: its instructions by name, in program order."""

    ops: dict[str, Op]
    root: str

    @property
    def parameters(self) -> list[Op]:
        """The parameters, ordered by number."""
        parameters = [op for op in self.ops.values() if op.kind == "parameter"]
        return sorted(parameters, key=lambda op: int(op.find(r"parameter\((\d+)")))


class Program:
    """The computations of a compiled program.

    assumed: trip counts of loops with a data-dependent length, by a substring of their
        `Op.path`.
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

    def visit(
        self, name: str = "", times: float = 1
    ) -> Iterator[tuple[Op, str, float]]:
        """Yields (instruction, its computation, its run count); fusions are whole.

        Only the last branch of a conditional counts: the one that `lax.cond` takes if
        its condition holds, which is the usual case of every condition here.
        """
        name = name or self.entry
        for op in self.computations[name].ops.values():
            yield op, name, times
            if op.kind == "while":
                yield from self.visit(op.called("body"), times * self.trips(op))
            elif op.kind == "call":
                yield from self.visit(op.called("to_apply"), times)
            elif op.kind == "conditional":
                names = op.find(r"branch_computations=\{([^}]*)\}")
                for branch in re.findall(r"[\w.\-]+", names)[-1:]:
                    yield from self.visit(branch, times)

    def trips(self, loop: Op) -> float:
        """Returns the trip count of a loop."""
        condition = self.computations[loop.called("condition")]
        test = condition.ops[condition.root]
        for limit in (condition.ops[name] for name in test.operands):
            if limit.kind == "constant" and "direction=LT" in test.text:
                return max(int(limit.find(r"constant\((-?\d+)")), 0)
        if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)  # the condition is a fusion
        return next((n for part, n in self.assumed.items() if part in loop.path), 1)

    def inside(self, op: Op) -> Iterator[tuple[Op, str]]:
        """Yields the instructions of a fusion, and the name of their computation."""
        name = op.called("calls")
        for inner in self.computations[name].ops.values() if name else ():
            yield inner, name
            yield from self.inside(inner)

    @functools.cache  # noqa: B019 - programs are short-lived
    def users(self, name: str) -> dict[str, list[Op]]:
        """Returns the instructions of a computation that use each of its arrays."""
        users: dict[str, list[Op]] = {}
        for op in self.computations[name].ops.values():
            for operand in set(op.operands):
                users.setdefault(operand, []).append(op)
        return users

    @functools.cache  # noqa: B019 - programs are short-lived
    def purpose(self, name: str, array: str) -> str:
        """Returns the path of an instruction, or of the first user that has one."""
        if path := self.computations[name].ops[array].path:
            return path
        users = self.users(name).get(array, [])
        return next(filter(None, (self.purpose(name, op.name) for op in users)), "")


def parse_op(line: str) -> Op | None:
    """Parses the instruction on a line, if any."""
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    end = closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    call = re.match(r"\s*([\w\-]+)\(", line[end:])
    if not call:
        return None
    opens = end + call.end() - 1
    operands = tuple(re.findall(r"%([\w.\-]+)", line[opens : closing(line, opens)]))
    return Op(head[1], call[1], arrays_of(line[start:end]), operands, line[end:])


def closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that matches the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, with tuples flattened."""
    arrays = []
    for dtype, sizes, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text):
        if dtype in WIDTHS:
            size = math.prod(map(int, filter(None, sizes.split(","))))
            in_hbm = not re.search(r"S\([1-9]", layout)
            arrays.append(Array(size * WIDTHS[dtype], in_hbm))
    return tuple(arrays)
