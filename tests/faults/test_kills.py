"""A run that is killed anywhere ends bit-identical to one that never was."""

from pathlib import Path

import pytest

from tests.faults import kills


def test_three_kills(tmp_path: Path) -> None:
    assert kills.torture(tmp_path, 3, seed=1)["kills"] == 3


@pytest.mark.long
def test_forty_kills(tmp_path: Path) -> None:
    assert kills.torture(tmp_path, 40, seed=2)["kills"] == 40
