"""Constraints and properties of the fields of a config, as metadata of dataclasses.

A function gives a field its default and the constraint on its values, which `check`
reads. `field` adds properties, which `config.FIELDS` collects:

    width: int = at_least(1, default=8)
    path: str = field("", "local", "changeable")
    depth: int = field(at_least(1, 2), modes="evaluate speed")
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

from txl_jax.errors import UserError, require_one_of

T = TypeVar("T")
Number = TypeVar("Number", int, float)

KEY = "check"  # of the metadata: a function that raises UserError

Property = Literal[
    "identity",  # a run with another value is another run; of sections,
    "changeable",  # and of their fields that may change when a run resumes
    "free",  # a run may start from parameters that were trained with another value
    "inherited",  # a run with train.init_from takes the value from its source
    "local",  # files or devices of this machine: not released with a model
    "unsaved",  # modes that save a config for other modes have no flag for the field
]

# Modes that use the description of a run, those that use a trained model, and those of
# the sections `model` and `data`.
TRAINING = "train compile table"
READING = "evaluate generate score attention speed recl"
MODEL = f"{TRAINING} {READING} export"
DATA = f"{TRAINING} evaluate generate attention speed recl prepare"


def field(default: T, *properties: Property, modes: str = "") -> T:
    """Adds properties; modes: those that use the field, in place of its section's."""
    metadata: dict[str, object] = dict.fromkeys(properties, True)
    if modes:
        metadata["modes"] = frozenset(modes.split())
    if isinstance(default, dataclasses.Field):
        value: Any = default.default
        return _field(value, {**default.metadata, **metadata})
    return _field(default, metadata)


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

    return _field(default, {KEY: require})


def one_of(choices: Collection[T], default: T) -> T:
    """Constrains a value to the given choices."""

    def require(value: Any, name: str) -> None:
        require_one_of(value, choices, name)

    return _field(default, {KEY: require})


def check(options: Any, section: str) -> None:
    """Raises UserError for the first field whose value violates its constraint."""
    for each in dataclasses.fields(options):
        require = each.metadata.get(KEY, _require_finite)
        require(getattr(options, each.name), f"{section}.{each.name}")


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

    return _field(default, {KEY: require})


def _field(default: T, metadata: dict[str, object]) -> T:
    return dataclasses.field(default=default, metadata=metadata)
