"""Tables and text in Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; cells may be any text without line ends."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |\n"
        for line in lines
    )


def code(text: str) -> str:
    """Returns a text as code, or "" if it is empty."""
    return f"`{text}`" if text else ""


def revision(text: str) -> str:
    """Returns the beginning of a git revision as code, and `+dirty` if it has that."""
    return code(text[:7] + text[40:])


def block(command: str) -> str:
    """Returns a command as a block."""
    return f"```sh\n{command}\n```\n"
