"""Sections of a config and their fields: defaults, constraints, help, modes, roles.

@dataclass(frozen=True)
class SketchConfig(Section, name="sketch", modes="train score", roles=Role.IDENTITY):
    width: int = field(8, at_least(1), help="Features of a token.")
    folder: str = field("", modes="train", roles=Role.LOCAL, help="Where it lies.")
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

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


def between(low: int, high: int) -> Check:
    """Constrains a number to a range, both ends included."""

    def check(value: Any, name: str) -> None:
        if not low <= value <= high:
            raise UserError(f"{name} = {value} must be from {low} to {high}")

    return check


# Sizes of a batch, whose arrays the host makes before a device could refuse them.
size, size_or_off = between(1, 2**20), between(0, 2**20)


class Choices(tuple[Any, ...]):
    """Constrains a value to the given choices, which --help lists."""

    def __call__(self, value: object, name: str) -> None:
        """Raises UserError for another value."""
        require_one_of(value, self, name)


one_of = Choices


# Modes that train, or save a config for a training, and modes that have a model.
TRAINING = "train import compile table"
WITH_MODEL = f"{TRAINING} evaluate generate score attention export speed recl"


class Role(enum.Flag):
    """What the value of a field means to other runs and machines."""

    NONE = 0
    IDENTITY = enum.auto()  # a run with another value is a different run
    ARCHITECTURE = enum.auto()  # parameters fit only the value they were trained with
    INHERITED = enum.auto()  # a run with train.init_from takes it from its source
    LOCAL = enum.auto()  # a file or device of this machine: not released with a model


# Values of each type, in messages.
WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def read_bool(text: str) -> bool:
    """Returns the value of a text; raises KeyError."""
    return {"false": False, "true": True}[text.strip().lower()]


class Field(NamedTuple):
    """The declaration of a field."""

    name: str  # "section.field", such as "model.n_layer"
    type: type
    default: Any
    check: Check
    help: str  # one or more sentences
    modes: tuple[str, ...]  # that read it, or save it for others
    roles: Role

    @property
    def key(self) -> str:
        """The name without the section."""
        return self.name.partition(".")[2]

    def convert(self, value: Any) -> Any:
        """Returns a value of the field's type, from JSON or Python; raises UserError.

        An int becomes a float, and a list a tuple.
        """
        if items := get_args(self.type):
            if type(value) in (tuple, list) and all(type(x) is items[0] for x in value):
                return tuple(value)
            wanted = f"a tuple of {items[0].__name__}s"
            raise UserError(f"{self.name} = {value!r} must be {wanted}")
        if self.type is float and type(value) is int:
            return float(value) if abs(value) < 2**1023 else math.inf
        if type(value) is not self.type:
            wanted = self.type.__name__
            raise UserError(f"{self.name} = {value!r} must be of type {wanted}")
        return value

    def read(self, text: str) -> Any:
        """Returns the value of a flag, with commas in a tuple; raises UserError."""
        items = get_args(self.type)
        item_type = items[0] if items else self.type
        parts = text.strip("()").split(",") if items else [text]
        parse = read_bool if item_type is bool else item_type
        try:
            values = tuple(parse(x) for x in parts if x.strip() or not items)
        except (ValueError, KeyError):
            wanted = WANTED[item_type]
            wanted += ", or several with commas between" if items else ""
            raise UserError(f"{self.name} = {text[:80]!r} is not {wanted}") from None
        return values if items else values[0]


def field(
    default: T,
    check: Check = NOT_NEGATIVE,
    *,
    help: str,
    modes: str = "",
    roles: Role | None = None,
) -> T:
    """Declares a field of a Section, as in `Field`.

    modes, with spaces between, and roles replace those of the section.
    """
    metadata = {"check": check, "help": help, "modes": modes, "roles": roles}
    declared: Any = dataclasses.field(default=default, metadata=metadata)
    return declared


@dataclasses.dataclass(frozen=True)
class Section:
    """Base class of the sections of a config, which are frozen dataclasses."""

    name: ClassVar[str]
    modes: ClassVar[str]  # of fields that state none
    roles: ClassVar[Role]

    def __init_subclass__(
        cls, *, name: str, modes: str = "", roles: Role = Role.NONE
    ) -> None:
        """Takes the section's name, and the modes and roles of its fields."""
        cls.name, cls.modes, cls.roles = name, modes, roles

    def __post_init__(self) -> None:
        """Raises UserError for the first value that violates its constraint."""
        for each in self.fields():
            each.check(getattr(self, each.key), each.name)

    @classmethod
    def fields(cls) -> list[Field]:
        """Returns the declarations of the section's fields."""
        return [
            Field(
                name=f"{cls.name}.{each.name}",
                type=each.type,  # type: ignore[arg-type]  # a string if postponed
                default=each.default,
                check=each.metadata["check"],
                help=each.metadata["help"],
                modes=tuple((each.metadata["modes"] or cls.modes).split()),
                roles=cls.roles if (x := each.metadata["roles"]) is None else x,
            )
            for each in dataclasses.fields(cls)
        ]
