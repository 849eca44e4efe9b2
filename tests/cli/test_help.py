"""Every field of the config has a meaning, read from the comment beside it."""

import dataclasses
import re

from txl_jax import config
from txl_jax.cli import help
from txl_jax.cli.help import Field

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


def test_help_reads_comments_types_and_defaults() -> None:
    assert help.describe("example", Example) == [
        Field("example.width", "int", "3", "in tokens"),
        Field("example.shape", "ints", "1,2", "A meaning that takes two lines."),
        Field("example.kind", "str", "narrow", 'one of narrow, wide; "" = none'),
        Field("example.text", "str", r"# no comment\n", ""),
        Field("example.on", "bool", "true", "NAMES says more"),
    ]
    assert help.summary(Example) == "What this section says. And more of it."


def test_every_field_and_section_of_the_config_is_described_in_sentences() -> None:
    for section, options in config.SECTIONS.items():
        assert help.summary(options).endswith(".")
        described = help.describe(section, options)
        names = [f"{section}.{field.name}" for field in dataclasses.fields(options)]
        assert [field.name for field in described] == names
        whole = re.compile(r"[A-Z][^|]*\.")  # a sentence, also in a table of the docs
        assert not [x.name for x in described if not whole.fullmatch(x.meaning)]
