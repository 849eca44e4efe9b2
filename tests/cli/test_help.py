"""Every field of the config has a meaning, read from the comment beside it."""

import dataclasses
import re

from txl_jax import config
from txl_jax.cli import help


def test_every_field_and_section_of_the_config_is_described_in_sentences() -> None:
    for section, options in config.SECTIONS.items():
        assert help.summary(options).endswith(".")
        described = help.describe(section, options)
        names = [f"{section}.{field.name}" for field in dataclasses.fields(options)]
        assert [field.name for field in described] == names
        whole = re.compile(r"[A-Z][^|]*\.")  # a sentence, also in a table of the docs
        assert not [x.name for x in described if not whole.fullmatch(x.meaning)]
