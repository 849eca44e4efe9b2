"""Runs on Weights & Biases, in its offline mode."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.support.refusal import refused
from txl_jax.report import wandb

START = {"time": "2026-11-23T03:00:00+00:00", "host": "one", "pid": 7}


@pytest.mark.filterwarnings("default")  # of the library
def test_a_resumed_run_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    starts = [(START, [1, 2]), (START, [2, 3]), (START | {"pid": 8}, [4])]
    for start, updates in starts:
        log = wandb.opened("mine", tmp_path, start, {"optim": {"lr": 0.5}})
        for update in updates:
            log(update, {"train/loss": update + 0.0625})
        importlib.import_module("wandb").finish()
    importlib.import_module("wandb").teardown()  # writes the files
    paths = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    one, again, other = (path.stem for path in paths)
    assert one == again != other
    for path, (_, updates) in zip(paths, starts, strict=True):
        data = path.read_bytes()
        assert b"mine" in data and b"train/loss" in data
        logged = [update for update in range(1, 5) if f"{update}.0625".encode() in data]
        assert logged == updates
    assert capfd.readouterr().out == "", "stdout is for the result"


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(
        r"run.wandb = 'mine' cannot be opened .*: pip install 'txl_jax.wandb."
    ):
        wandb.opened("mine", tmp_path, START, {})
    wandb.opened("", tmp_path, START, {})(1, {"train/loss": 1.0})
    assert not list(tmp_path.iterdir())
