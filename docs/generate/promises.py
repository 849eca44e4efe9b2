"""The README's guarantees, and the tests that are marked with them."""

import ast
import re
from collections.abc import Iterator

from generate.markdown import ROOT, code, table

MARK = "pytest.mark.promise"


def guarantees() -> list[str]:
    """Returns the bold words that begin the guarantees of the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    return [
        words.rstrip(".,") for words in re.findall(r"^- \*\*(.+?)\*\*", section, re.M)
    ]


def marks(nodes: list[ast.expr]) -> Iterator[str]:
    """Yields the arguments of the promise marks in expressions."""
    for root in nodes:
        for node in ast.walk(root):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK:
                (argument,) = node.args
                yield ast.literal_eval(argument)


def marked() -> Iterator[tuple[str, str]]:
    """Yields (guarantee, test) for every mark; a test is a file or `file::function`."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, file = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
        if MARK not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                for guarantee in marks(node.decorator_list):
                    yield guarantee, f"{file}::{node.name}"
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == (
                "pytestmark"
            ):
                for guarantee in marks([node.value]):
                    yield guarantee, file


def guaranteed() -> str:
    """Returns the guarantees and their tests, as a table."""
    tests = list(marked())
    rows = [
        (each, ", ".join(code(test) for guarantee, test in tests if guarantee == each))
        for each in guarantees()
    ]
    return table(("guarantee", "tests"), rows)
