"""Every guarantee of the README has a test, and every mark names a guarantee."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def promises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the module that generates the table of promises."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("generate.promises")


def test_guarantees_and_marks_agree(promises: Any) -> None:
    guarantees = set(promises.guarantees())
    marked = {guarantee for guarantee, _ in promises.marked()}
    assert len(guarantees) >= 5
    assert guarantees - marked == set(), "a guarantee without a test"
    assert marked - guarantees == set(), "a mark without a guarantee"


@pytest.mark.parametrize(
    "source, expected",
    [
        ('@pytest.mark.promise("A")\ndef test_a(): ...', [("A", "::test_a")]),
        ('pytestmark = [pytest.mark.promise("A"), pytest.mark.long]', [("A", "")]),
        ('def test_a(): "pytest.mark.promise"', []),
    ],
)
def test_marks_are_read_without_running_tests(
    promises: Any,
    source: str,
    expected: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promises, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(source)
    expected = [(name, "tests/test_x.py" + function) for name, function in expected]
    assert list(promises.marked()) == expected
