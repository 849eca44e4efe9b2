"""Errors are one short line of printable text."""

import pytest

from txl_jax.errors import UserError, printable


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\tb\n", "a\tb\n"),
        ("\x1b[2J\x07é😀", "\\x1b[2J\\x07é😀"),
        ("\u2067a", "\\u2067a"),
        ("caf\udce9", "caf\\udce9"),
        ("\u3000 \xa0\u200d", "\u3000 \xa0\u200d"),
    ],
)
def test_a_terminal_gets_no_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_error_is_one_line_without_its_middle() -> None:
    assert str(UserError("no file 'a\nb\x1b': give\none")) == (
        "no file 'a b\\x1b': give one"
    )
    line = str(UserError(f"word {'x' * 10**6} is unknown: fix it"))
    assert len(line) < 1000
    assert line.startswith("word xx") and line.endswith("xx is unknown: fix it")
