"""The programs in experiments/recipes keep what they convert."""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

RECIPES = Path(__file__).parents[2] / "experiments" / "recipes"


def test_a_series_is_quantised_to_levels_in_use() -> None:
    recipe = runpy.run_path(str(RECIPES / "series.py"))
    numbers = recipe["quantise"](recipe["solve"](2000))
    assert len(numbers) == 2000 and numbers.dtype == np.uint8
    assert 0 < numbers.min() < 40 and 110 < numbers.max() < recipe["LEVELS"] - 1
    assert np.abs(np.diff(numbers.astype(int))).max() < 12, "it is smooth"


def test_midi_becomes_the_same_numbers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("miditoolkit", reason="pip install miditoolkit")
    numbers = np.array([60, 195, 64, 195, 131, 67, 192, 190, 72, 255], np.uint8)
    np.save(tmp_path / "a.npy", numbers)
    monkeypatch.chdir(tmp_path)
    for argv in (["a.npy", "a.mid"], ["a.mid", "b.npy"]):
        monkeypatch.setattr(sys, "argv", ["midi", *argv])
        runpy.run_path(str(RECIPES / "midi.py"))
    assert os.path.getsize("a.mid") > 50
    np.testing.assert_array_equal(np.load("b.npy"), numbers)
