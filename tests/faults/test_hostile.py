"""Every damaged, hostile or impossible input of `hostile` is refused in one line."""

from pathlib import Path

import pytest

from tests.faults import cases, hostile
from tests.support.refusal import refused

pytestmark = pytest.mark.promise("User errors are one line")
ROWS = (Path(__file__).parent / "hostile.txt").read_text("utf-8")


def rows() -> list[tuple[str, str, str]]:
    """Returns the reader, the damage and a part of the error of each row."""
    table = []
    for line in ROWS.splitlines():
        if line and not line.startswith("#"):
            reader, damage, part = (cell.strip() for cell in line.split(" | "))
            table.append((reader, damage, part))
    return table


@pytest.mark.parametrize("reader, damage, part", rows(), ids=str)
def test_damage_is_refused_in_one_line(
    reader: str, damage: str, part: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "input").mkdir()
    states: list[dict[Path, tuple[int, ...]]] = []

    def look() -> None:
        paths = [*folder.rglob("*")]
        stats = {path: path.lstat() for path in paths if path.is_file()}
        states.append({x: (s.st_size, s.st_mtime_ns) for x, s in stats.items()})

    look()
    with refused(".") as caught:
        hostile.refuse(reader, damage, folder, look)
    look()
    assert {path: states[-1].get(path) for path in states[-2]} == states[-2]
    assert part in str(caught.value) and len(str(caught.value)) < 950


@pytest.mark.parametrize("reader", hostile.VALID)
def test_the_same_input_without_damage_is_read(reader: str, tmp_path: Path) -> None:
    hostile.read_valid(reader, tmp_path)


def test_the_list_of_cases_is_current() -> None:
    """`python -m tests.faults.cases` writes it."""
    assert cases.PAGE.read_text("utf-8") == cases.page()
    assert sum(len(rows) for _, rows in cases.groups()) >= 600
