"""Every damaged, hostile or impossible input of `hostile` is refused in one line."""

from pathlib import Path

import pytest

from tests.faults import cases, hostile
from tests.promises.test_bad_inputs import contents
from tests.support.refusal import refused

pytestmark = pytest.mark.promise("User errors are one line")


@pytest.mark.parametrize("reader, damage, part", hostile.ROWS, ids=str)
def test_damage_is_refused_in_one_line(
    reader: str, damage: str, part: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "input").mkdir()
    states = [contents(folder)]
    with refused(".") as caught:
        hostile.refuse(reader, damage, folder, lambda: states.append(contents(folder)))
    after = contents(folder)
    assert {path: after.get(path) for path in states[-1]} == states[-1]
    assert part in str(caught.value) and len(str(caught.value)) < 950


@pytest.mark.parametrize("reader", hostile.VALID)
def test_the_same_input_without_damage_is_read(reader: str, tmp_path: Path) -> None:
    hostile.read_valid(reader, tmp_path)


def test_the_list_of_cases_is_current() -> None:
    """`python -m tests.faults.cases` writes it."""
    assert cases.PAGE.read_text("utf-8") == cases.page()
    assert sum(len(rows) for rows in cases.groups().values()) >= 600
