"""Every field of the config has a meaning, read from the comment beside it."""

import dataclasses

from txl_jax import config
from txl_jax.cli import schema
from txl_jax.cli.schema import Field

NAMES = ("narrow", "wide")


@dataclasses.dataclass(frozen=True)
class Example:
    """What this section says. And more of it.

    A second paragraph.
    """

    # A heading of several fields.
    width: int = 3  # in tokens

    # A meaning that takes
    # two lines.
    shape: tuple[int, ...] = (1, 2)
    kind: str = "narrow"  # one of NAMES; "" = none
    text: str = "# no comment\n"
    on: bool = True  # NAMES says more

    def method(self) -> int:
        """Has a comment that belongs to no field."""
        count: int = 1  # no field
        return count


def test_reads_comments_types_and_defaults() -> None:
    assert schema.describe({"example": Example}) == {
        "example": [
            Field("example.width", "int", "3", "in tokens"),
            Field("example.shape", "ints", "1,2", "A meaning that takes two lines."),
            Field("example.kind", "str", "narrow", 'one of narrow, wide; "" = none'),
            Field("example.text", "str", r"# no comment\n", ""),
            Field("example.on", "bool", "true", "NAMES says more"),
        ]
    }


def test_the_summary_is_the_first_paragraph() -> None:
    assert schema.summary(Example) == "What this section says. And more of it."


def test_every_field_and_section_of_the_config_has_a_meaning() -> None:
    described = schema.describe(config.SECTIONS)
    assert list(described) == list(config.SECTIONS)
    for section, found in described.items():
        assert schema.summary(config.SECTIONS[section]).endswith(".")
        names = [field.name for field in dataclasses.fields(config.SECTIONS[section])]
        assert [field.name for field in found] == [f"{section}.{x}" for x in names]
        assert not [field.name for field in found if not field.meaning]


def test_a_name_in_a_table_is_spelt_out() -> None:
    described = {
        field.name: field.meaning
        for found in schema.describe(config.SECTIONS).values()
        for field in found
    }
    assert described["optim.optimizer"] == "one of adam, lamb, sgd"
    assert "stdlib, text, copying, enwik8" in described["data.corpus"]
