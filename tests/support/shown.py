"""Outputs that documentation and notebooks show."""

import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def assert_shown(printed: str, shown: str, relative: float = 0.0) -> None:
    """Asserts that the words agree, and the numbers up to rounding.

    The last decimal place may differ by 1, or a number by `relative`.
    """
    words = [NUMBER.sub("0", text).split() for text in (printed, shown)]
    assert words[0] == words[1], printed
    for new, old in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        places = len(old.partition(".")[2])
        rounding = 1.01 * 10**-places if places else 0.0
        new, old = (float(x.replace(",", "")) for x in (new, old))
        assert abs(new - old) <= max(rounding, relative * abs(old)), printed
