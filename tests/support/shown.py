"""Outputs that documentation shows."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def assert_shown(printed: str, shown: str, digits: int = 1) -> None:
    """Asserts that the words agree, and numbers up to some units of the last digit.

    Rounding differs between processors; integers below 1,000 must be equal.
    """
    assert NUMBER.sub("0", printed).split() == NUMBER.sub("0", shown).split(), printed
    for new, old in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        unit = 10.0 ** -len(old.partition(".")[2])
        allowed = digits * unit if "." in old else 0.0
        assert abs(float(new) - float(old)) <= 1.01 * allowed, printed
