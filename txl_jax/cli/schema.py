"""The descriptions of the config's fields, read from the comments in the source.

The description of a dataclass field is the comment at the end of its line or, without
one, the comment on the lines above. `--helpfull` and the documentation show it.
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
    """The description of one field."""

    name: str  # "section.field", such as "model.n_layer"
    type: str  # bool, int, float or str; "ints" etc. for a tuple
    default: str  # as the text of a flag
    meaning: str


def describe(sections: Mapping[str, type]) -> dict[str, list[Field]]:
    """Returns the fields of each section in order, given `config.SECTIONS`."""
    return {name: _read(name, section) for name, section in sections.items()}


def summary(section: type) -> str:
    """Returns the first paragraph of a section's docstring."""
    return (inspect.getdoc(section) or "").split("\n\n")[0].replace("\n", " ")


def as_flag(value: Any) -> str:
    """Returns the text of a flag that sets a field to `value`, without line ends."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_flag, value))
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


def _type(annotation: Any) -> str:
    items = get_args(annotation)
    return f"{items[0].__name__}s" if items else annotation.__name__


def _meanings(section: type) -> dict[str, str]:
    """Returns {field: comment} of the dataclass, "" for a field without one."""
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
    meanings = {}
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
        meanings[node.target.id] = " ".join(own or above)
    return meanings


def _spell_out(meaning: str, module: dict[str, Any]) -> str:
    """Replaces the name of a constant in "one of NAMES" by the names in it."""

    def names(match: re.Match[str]) -> str:
        return f"one of {', '.join(module[match[1]])}"

    return re.sub(r"one of ([A-Z]{3,})\b", names, meaning)
