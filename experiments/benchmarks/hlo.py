"""The collectives of a compiled program, read from its text.

An instruction in a loop counts as often as the loop runs. A loop whose length depends
on the data, such as the softmax's over the tokens of a rare cluster, counts once.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "fsuc" for bits in (8, 16, 32, 64, 128)
}
KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()


class Op(NamedTuple):
    """One instruction."""

    kind: str
    type: str  # the result's, such as f32[2,3]{1,0}
    text: str  # operands and attributes
    root: bool

    def match(self, pattern: str) -> str:
        """Returns the first group of a regular expression in the text, or ""."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.text.partition(")")[0])


class HloProgram:
    """The instructions of a compiled program, by computation and name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = name = ""
        instruction = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = head[2]
                self.computations[name] = {}
                self.entry = name if head[1] else self.entry
            elif match := instruction.match(line):
                root, target, result, kind, rest = match.groups()
                self.computations[name][target] = Op(kind, result, rest, bool(root))

    def visit(self, name: str = "", times: int = 1) -> Iterator[tuple[Op, str, int]]:
        """Yields (instruction, its computation, how often it runs).

        In a conditional only the branch that `lax.cond` takes for a true condition
        counts, the usual case here.
        """
        name = name or self.entry
        for op in self.computations[name].values():
            yield op, name, times
            attribute, count = "", times
            if op.kind == "while":
                attribute, count = "body=", times * self.trips(op)
            elif op.kind == "conditional":
                attribute = r"(?:branch_computations=\{(?:[^}]*, )?|true_computation=)"
            elif op.kind in ("call", "fusion"):
                attribute = "(?:to_apply|calls)="
            if attribute and (called := op.match(attribute + r"%?([\w.\-]+)")):
                yield from self.visit(called, count)

    def trips(self, loop: Op) -> int:
        """Returns the trip count of a loop, 1 if it depends on the data."""
        if known := loop.match(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations[loop.match(r"condition=%?([\w.\-]+)")]
        test = next(op for op in condition.values() if op.root)
        for limit in (condition[operand] for operand in test.operands):
            if limit.kind == "constant" and "direction=LT" in test.text:
                return max(int(limit.match(r"(-?\d+)")), 0)
        return 1


class Collective(NamedTuple):
    """An exchange of arrays between devices.

    bytes: size of the whole arrays: results of a gather, operands of a scatter.
    """

    kind: str
    bytes: int
    times: int


def collectives(program: HloProgram) -> list[Collective]:
    """Returns all collectives; one that is a chain of fusions is returned once."""
    result, seen = [], set()
    for op, name, times in program.visit():
        kind, home = op.kind.removesuffix("-start"), program.computations[name]
        if kind not in KINDS:
            continue
        chain = op.match(r'(channel_id=\d+.*chain_id="\d+")')
        if chain and chain in seen:
            continue
        seen.add(chain)
        types = (home[operand].type for operand in op.operands)
        taken = sum(size for each in types for size in array_bytes(each))
        made = sum(array_bytes(op.type))
        if kind != op.kind and made > taken:
            made -= taken  # the start of an asynchronous one returns its operands too
        made = taken if kind == "reduce-scatter" else made
        if name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        result.append(Collective(kind, made, times))
    return result


def array_bytes(text: str) -> Iterator[int]:
    """Yields the bytes of the arrays of a type, without padding."""
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", text):
        if dtype in WIDTHS:
            yield math.prod(map(int, filter(None, sizes.split(",")))) * WIDTHS[dtype]
