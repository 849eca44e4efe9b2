"""The programs in experiments/recipes convert without loss, and report user errors."""

import dataclasses
import importlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.recipes.classification import check_model
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig

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
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module("experiments.recipes.midi", run_name="__main__")
    assert os.path.getsize("a.mid") > 50
    np.testing.assert_array_equal(np.load("b.npy"), numbers)


@pytest.mark.parametrize(
    "program, flags, line",
    [
        ("figures.reach", "--tgt_len=0", "argument --tgt_len: 0 must be at least 1"),
        ("figures.reach", "--mem_len=-1", "model.mem_len = -1 must be at least 0"),
        ("figures.positions", "--d_model=3", "--d_model=3 must be even"),
        ("figures.positions", "--workdir=absent", "absent holds no run"),
        (
            "figures.learning",
            "--workdir=absent --log=x --picture=y.png",
            "holds no run",
        ),
        ("figures.reach", "--picture=y.xy", "--picture: y.xy must end with .png"),
        ("figures.online", "--path=absent", "--path=absent: No such file"),
        ("figures.copying", "--delays 0", "argument --delays: 0 must be at least 1"),
        ("figures.memories", "--table=absent", "cannot use absent: No such file"),
        ("figures.copying", "--recall 27", "argument --recall: invalid choice: 27"),
        ("recipes.tasks", "copying --length=27", "--length and --symbols are at most"),
        ("recipes.series", "draw --samples=absent.npy", "cannot use absent.npy: No su"),
        ("recipes.midi", "absent.mid absent.npy", "cannot use absent.mid: No such fil"),
        ("recipes.classification", "--model=absent", "absent holds no run"),
        ("recipes.classification", "--length=99", "--length=99 must be a positive"),
    ],
)
def test_errors_are_one_line(
    program: str, flags: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *flags.split()])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(importlib.import_module(f"experiments.{program}").main())
    stdout, stderr = capsys.readouterr()
    assert ended.value.code == 2 and not stdout
    assert line in stderr.strip().splitlines()[-1] and "Traceback" not in stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"mem_len": 0},
        {"retrieval_len": 256},
        {"compressed_len": 8, "compression_rate": 2},
        {},
    ],
    ids=str,
)
def test_only_the_memory_of_the_paper_is_classified(changes: dict[str, Any]) -> None:
    model = dataclasses.replace(ModelConfig(mem_len=64), **changes)
    loaded: Any = types.SimpleNamespace(
        config=types.SimpleNamespace(model=model), vocab=types.SimpleNamespace(kind="")
    )
    if not changes:
        return check_model(loaded, 64)
    with pytest.raises(UserError, match="this model has another memory"):
        check_model(loaded, 64)
