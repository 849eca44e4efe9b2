"""Constraints of single fields of a config.

Each function gives a dataclass field its default and the constraint on its values, as
metadata that `check` reads:

    width: int = at_least(1, default=8)
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from txl_jax.errors import UserError, require_one_of

T = TypeVar("T")
Number = TypeVar("Number", int, float)

KEY = "check"  # of the metadata: a function that raises UserError


def at_least(least: float, default: Number) -> Number:
    """Constrains a number to `least` and above."""
    return _number(default, lambda value: value >= least, f"at least {least}")


def positive(default: float) -> float:
    """Constrains a number to be greater than 0."""
    return _number(default, lambda value: value > 0, "above 0")


def fraction(default: float) -> float:
    """Constrains a number to 0 and above but below 1."""
    return _number(default, lambda value: 0 <= value < 1, "at least 0 and below 1")


def between(least: int, most: int, default: int) -> int:
    """Constrains a number to a range, both ends included."""

    def require(value: Any, name: str) -> None:
        if not least <= value <= most:
            raise UserError(f"{name} = {value} must be from {least} to {most}")

    return _field(default, require)


def one_of(choices: Collection[T], default: T) -> T:
    """Constrains a value to the given choices."""
    return _field(default, lambda value, name: require_one_of(value, choices, name))


def check(options: Any, section: str) -> None:
    """Raises UserError for the first field whose value violates its constraint."""
    for field in dataclasses.fields(options):
        require = field.metadata.get(KEY, _require_finite)
        require(getattr(options, field.name), f"{section}.{field.name}")


def _require_finite(value: Any, name: str) -> None:
    """Raises UserError for NaN, infinity and integers beyond 32 bits."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, float) and not math.isfinite(each):
            raise UserError(f"{name} = {each} must be a finite number")
        if isinstance(each, int) and abs(each) >= 2**31:
            raise UserError(
                f"{name} = {each!r:.20} is too large: it must be below 2^31"
            )


def _number(default: Number, holds: Callable[[Any], bool], wanted: str) -> Number:
    def require(value: Any, name: str) -> None:
        _require_finite(value, name)
        if not holds(value):
            raise UserError(f"{name} = {value} must be {wanted}")

    return _field(default, require)


def _field(default: T, require: Callable[[Any, str], None]) -> T:
    return dataclasses.field(default=default, metadata={KEY: require})
