"""Any value of any field of a config is taken, or refused in one line that names it.

The mistakes that somebody thought of are in `test_bad_inputs.py`.
"""

import dataclasses
import json
import math
from typing import Any

import pytest
from ml_collections import ConfigDict

from txl_jax import config as configs
from txl_jax.errors import UserError

pytestmark = pytest.mark.promise("User errors are one line")


def odd_values() -> list[Any]:
    huge: tuple[Any, ...] = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**64, 10**400)
    floats = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308)
    others: tuple[Any, ...] = (
        "",
        "x",
        "\0",
        "é" * 1000,
        b"x",
        None,
        (),
        [],
        [None],
        {},
        (1, "x"),
        1j,
    )
    return [*huge, *floats, *others, True, False, (-1,), (2**64,), (True,)]


def test_any_value_of_any_field_is_taken_or_refused() -> None:
    """Each alone, from a config and from a flag; over 3,000 of them."""
    tried = refused = 0
    for section, fields in configs.SECTIONS.items():
        for field in dataclasses.fields(fields):
            name = f"{section}.{field.name}"
            for value in odd_values():
                for give in (as_file, as_flag):
                    tried += 1
                    try:
                        parsed = configs.parse(give(name, value))
                    except UserError as error:
                        refused += 1
                        message = str(error)
                        assert "\n" not in message and field.name in message
                    else:
                        json.dumps(dataclasses.asdict(parsed), allow_nan=False)
    assert tried > 3000 and refused > 2000


def as_file(name: str, value: Any) -> ConfigDict:
    section, _, key = name.partition(".")
    return ConfigDict({section: {key: value}})


def as_flag(name: str, value: Any) -> ConfigDict:
    config = ConfigDict({name.partition(".")[0]: {}})
    try:
        text = str(value)
    except ValueError:  # Python writes no number of so many digits
        text = "1" * 5000
    configs.override(config, name, text)
    return config
