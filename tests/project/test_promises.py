"""Every guarantee of the README has a test, and every mark names a guarantee."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_guarantees_and_marks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    promises = import_module("generate.promises")
    guarantees = set(promises.guarantees())
    marked = {guarantee for guarantee, _ in promises.marked()}
    assert len(guarantees) >= 5
    assert guarantees - marked == set(), "a guarantee without a test"
    assert marked - guarantees == set(), "a mark without a guarantee"
