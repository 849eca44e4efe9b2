"""The descriptions of the config's fields, read from the comments in the source.

The description of a dataclass field is the comment at the end of its line or, without
one, the comment on the lines above. `--helpfull` and the documentation show it.
"""

import dataclasses
import inspect
import re
import sys
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
    return {name: _describe(name, section) for name, section in sections.items()}


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


def _describe(name: str, section: type) -> list[Field]:
    meanings, module = _meanings(section), vars(sys.modules[section.__module__])
    fields = []
    for field in dataclasses.fields(section):
        items = get_args(field.type)
        kind = f"{items[0].__name__}s" if items else field.type.__name__  # type: ignore[union-attr]
        meaning = _spell_out(meanings[field.name], module)
        text = as_flag(field.default)
        fields.append(Field(f"{name}.{field.name}", kind, text, meaning))
    return fields


def _meanings(section: type) -> dict[str, str]:
    """Returns {field: comment} of the dataclass, "" for a field without one."""
    meanings: dict[str, str] = {}
    above: list[str] = []  # comments on the lines before
    for line in inspect.getsource(section).splitlines():
        code, _, beside = line.partition("  # ")
        if field := re.match(r"    (\w+): ", code):
            meanings.setdefault(field[1], beside or " ".join(above))
        comment = re.match(r"    # (.*)", line)
        above = [*above, comment[1]] if comment else []
    return meanings


def _spell_out(meaning: str, module: dict[str, Any]) -> str:
    """Replaces the name of a constant in "one of NAMES" by the names in it."""

    def names(match: re.Match[str]) -> str:
        return f"one of {', '.join(module[match[1]])}"

    return re.sub(r"one of ([A-Z]{3,})\b", names, meaning)
