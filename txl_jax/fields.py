"""What the config's fields mean, read from the comments beside them.

A field of a section is a line of a dataclass, and the comment at its end is its
meaning; where there is none, the comment on the lines above is. So `--helpfull` and the
documentation say what the reader of the code reads.

Dims: none.
"""

import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args


class Field(NamedTuple):
    """One field of the config, in words."""

    name: str  # as in "model.n_layer"
    type: str  # bool, int, float, str, or of several with commas "ints" and so on
    default: str  # as a flag would give it
    meaning: str


def describe(sections: Mapping[str, type]) -> dict[str, list[Field]]:
    """Returns the fields of every section, in order: `describe(config.SECTIONS)`."""
    return {name: _read(name, section) for name, section in sections.items()}


def summary(section: type) -> str:
    """Returns the first paragraph of a section's docstring."""
    return (inspect.getdoc(section) or "").split("\n\n")[0].replace("\n", " ")


def as_flag(value: Any) -> str:
    """Returns a field's value as a flag would give it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_flag, value))
    # A line end in a text would break the line that shows it.
    return value.encode("unicode_escape").decode() if type(value) is str else str(value)


def _read(name: str, section: type) -> list[Field]:
    meanings = _meanings(section)
    return [
        Field(
            f"{name}.{field.name}",
            _type(field.type),
            as_flag(field.default),
            _spell_out(meanings[field.name], vars(sys.modules[section.__module__])),
        )
        for field in dataclasses.fields(section)
    ]


def _type(given: Any) -> str:
    items = get_args(given)
    return f"{items[0].__name__}s" if items else given.__name__


def _meanings(section: type) -> dict[str, str]:
    """Returns the comment of each of the dataclass's fields, "" where it has none."""
    source = textwrap.dedent(inspect.getsource(section))
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    whole = {
        line
        for line, text in enumerate(source.splitlines(), 1)
        if text.lstrip().startswith("#")
    }
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        own = [
            comments[line]
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if line in comments
        ]
        above: list[str] = []
        while not own and node.lineno - 1 - len(above) in whole:
            above.insert(0, comments[node.lineno - 1 - len(above)])
        found[node.target.id] = " ".join(own or above)
    return found


def _spell_out(meaning: str, module: dict[str, Any]) -> str:
    """Replaces "one of NAMES" and "a name in NAMES" by the names themselves."""

    def names(match: re.Match[str]) -> str:
        found: Any = None
        for part in match[1].split("."):
            found = getattr(found, part) if found else module[part]
        return f"one of {', '.join(found)}"

    return re.sub(r"(?:one of|a name in) ((?:\w+\.)?[A-Z]{3,})\b", names, meaning)
