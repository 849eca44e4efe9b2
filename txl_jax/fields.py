"""Fields of a config: a default, a constraint on the values, and the text of --help.

width: int = field(8, at_least(1), help="Features of a token.")
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

from txl_jax.errors import UserError, require_one_of

T = TypeVar("T")
Values = dict[str, Any]  # values of fields, by "section.field"
# Raises UserError if a value is not valid for the field of this name.
Check = Callable[[Any, str], None]


def _numbers(holds: Callable[[float], bool], wanted: str) -> Check:
    """Constrains a number or the numbers in a tuple; strings pass."""

    def check(value: Any, name: str) -> None:
        values = value if isinstance(value, tuple) else (value,)
        numbers = [x for x in values if isinstance(x, (int, float))]
        for x in numbers:
            if isinstance(x, float) and not math.isfinite(x):
                raise UserError(f"{name} = {x} must be a finite number")
            if isinstance(x, int) and abs(x) >= 2**31:
                raise UserError(
                    f"{name} = {x!r:.20} is too large: it must be below 2^31"
                )
        if not all(map(holds, numbers)):
            raise UserError(f"{name} = {value} must be {wanted}")

    return check


def at_least(least: float) -> Check:
    """Constrains a number to `least` and above."""
    return _numbers(lambda x: x >= least, f"at least {least}")


NOT_NEGATIVE = at_least(0)
positive = _numbers(lambda x: x > 0, "above 0")
fraction = _numbers(lambda x: 0 <= x < 1, "at least 0 and below 1")


def between(least: int, most: int) -> Check:
    """Constrains a number to a range, both ends included."""

    def check(value: Any, name: str) -> None:
        if not least <= value <= most:
            raise UserError(f"{name} = {value} must be from {least} to {most}")

    return check


# Sizes of a batch, whose arrays the host makes before a device could refuse them.
size, size_or_off = between(1, 2**20), between(0, 2**20)


class Choices(tuple[Any, ...]):
    """Constrains a value to the given choices, which --help lists."""

    def __call__(self, value: object, name: str) -> None:
        """Raises UserError for another value."""
        require_one_of(value, self, name)


one_of = Choices


def field(default: T, check: Check = NOT_NEGATIVE, *, help: str) -> T:
    """Declares a field of a section of the config.

    help: one or more sentences, for --help and the documentation.
    """
    metadata = {"check": check, "help": help}
    declared: Any = dataclasses.field(default=default, metadata=metadata)
    return declared


def check(options: Any, section: str) -> None:
    """Raises UserError for the first field whose value violates its constraint."""
    for each in dataclasses.fields(options):
        each.metadata["check"](getattr(options, each.name), f"{section}.{each.name}")
