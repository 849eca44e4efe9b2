"""TensorBoard, and Weights & Biases, show each step once, also after a resume."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.test_disk import full_disk, lost_disk
from tests.support.refusal import refused
from txl_jax.report.metrics_log import MetricsLog, read_metrics
from txl_jax.report.viewers import (
    FOLDER,
    Events,
    check_wandb,
    open_wandb,
    write_result,
)


def shown(workdir: Path) -> dict[str, list[tuple[int, Any]]]:
    """Returns [(step, value)] per tag, as TensorBoard shows them."""
    reader = EventAccumulator(str(workdir / FOLDER), {"scalars": 0}).Reload()
    result: dict[str, list[tuple[int, Any]]] = {}
    for tag in reader.Tags()["scalars"]:
        result[tag] = [(x.step, x.value) for x in reader.Scalars(tag)]
    for tag in reader.Tags()["tensors"]:
        texts = [(x.step, x.tensor_proto.string_val[0]) for x in reader.Tensors(tag)]
        result[tag] = [(step, text.decode()) for step, text in texts]
    return result


def train(workdir: Path, last_step: int, steps: range, nll: float | None) -> None:
    with (
        Events(workdir, last_step) as events,
        MetricsLog(
            workdir / "metrics.jsonl", last_step, 20, 1, [events.scalars]
        ) as log,
    ):
        for step in steps:
            loss = math.nan if step == 2 else 1 / step
            metrics = {"loss": loss, "lr": 0.5, "tokens": 64, "skipped": step == 2}
            log.append([metrics | {"reason": "words are no scalars"}])
        if nll is not None:
            log.log_validation(nll)
        log.sync()


def test_each_step_is_shown_once_with_the_numbers_of_its_line(tmp_path: Path) -> None:
    """Steps 5 and 6 are lost by a kill; the validation of 4 comes after a resume."""
    train(tmp_path, 0, range(1, 7), None)
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(texts[:4]))
    train(tmp_path, 4, range(5, 5), 0.75)
    train(tmp_path, 4, range(5, 9), 0.5)
    assert len(list((tmp_path / FOLDER).iterdir())) == 3
    result = shown(tmp_path)
    assert [step for step, _ in result["train/loss"]] == list(range(1, 9))
    for tag, group, name in (
        ("train/loss", "exact", "loss"),
        ("train/learning_rate", "exact", "lr"),
        ("perf/tokens_per_second", "timing", "tokens_per_second"),
        ("perf/mfu", "timing", "mfu"),
    ):
        lines = read_metrics(tmp_path / "metrics.jsonl")
        written = [line for line in lines if "valid_nll" not in line["exact"]]
        for (_, value), line in zip(result[tag], written, strict=True):
            there = line[group][name]
            assert there is None or value == pytest.approx(there, rel=1e-6)
    assert math.isnan(result["train/loss"][1][1])
    assert result["train/skipped"][:3] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert result["valid/nll"] == [(4, 0.75), (8, 0.5)] and "train/reason" not in result


def test_the_newest_result_is_shown_verbatim(tmp_path: Path) -> None:
    write_result(tmp_path, tmp_path, 5, {"test/bpc": 2.0}, "an older one")
    code = "def f():\n    # 1 < 2\n    pass"
    write_result(tmp_path, tmp_path, 7, {"test/bpc": 1.5}, code)
    indented = "    def f():\n        # 1 < 2\n        pass"
    assert shown(tmp_path) == {"sample": [(7, indented)], "test/bpc": [(7, 1.5)]}


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    """They take seconds and hundreds of megabytes where they are installed."""
    for name in ("torch", "tensorflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError(__name__)")
    code = """
import sys
from pathlib import Path
from txl_jax.cli import convert, modes, training_run
from txl_jax.report.viewers import write_result
write_result(Path(sys.argv[1]), Path(sys.argv[1]), 5, {"test/bpc": 2.0}, "text")
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.parametrize("trouble", ["full", "lost"])
def test_a_full_or_lost_disk_ends_the_file_but_not_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    (tmp_path / FOLDER).mkdir()
    trouble_here = full_disk(200) if trouble == "full" else lost_disk(tmp_path / FOLDER)
    with trouble_here:
        with Events(tmp_path, 0) as events:
            for _ in range(300):
                events.scalars(1, {"train/loss": 1.0})
        reason = {"full": "File too large", "lost": "File exists"}[trouble]
        output = capfd.readouterr().err
    assert output == f"no more TensorBoard events until the next start ({reason})\n"


START = {"time": "2026-11-23T03:00:00+00:00", "host": "one", "pid": 7}


@pytest.mark.filterwarnings("default")  # the library warns
def test_a_resumed_run_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    starts = [(START, [1, 2]), (START, [2, 3]), (START | {"pid": 8}, [4])]
    for start, updates in starts:
        log = open_wandb("mine", tmp_path, start, {"optim": {"lr": 0.5}})
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
    with refused("run.wandb = 'mine' needs wandb: pip install"):
        check_wandb("mine")
    check_wandb("")
    open_wandb("", tmp_path, START, {})(1, {"train/loss": 1.0})
