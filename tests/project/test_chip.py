"""The benchmark of a chip: every kind of part at a tiny size, and the command."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.chip import __main__ as chip
from experiments.benchmarks.chip import measure
from experiments.benchmarks.record import Row

TINY: Row = {"dtype": "float32", "tiny": True, "trace": False, "kernel": "xla"}


@pytest.mark.parametrize(
    "part",
    [
        {"task": "train", **chip.TRAINING[3], "unroll": "all", "trace": True},
        {"task": "evaluate", **chip.EVALUATION},
        {"task": "generate", **chip.GENERATION},
    ],
    ids=chip.title,
)
def test_a_part_has_its_figures(part: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    row = {**TINY, **part}
    row |= measure.find_task(row)(row)() | {"compile_seconds": 1.0}
    assert row["tokens_per_second"] > 0
    if part["task"] == "train":
        assert row["loss"][0] > 0 and row["flops"] > row["mfu"] > 0
    assert bool(row.get("kernels")) == part.get("trace", False)


def test_the_command_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chip.main(["--tiny", "--only=check xla", f"--out={tmp_path}"]) == 0
    *table, result = capsys.readouterr().out.splitlines()
    assert json.loads(result)["failed"] == []
    assert any(line.startswith("| check |  | xla |") for line in table)
    (row,) = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert json.loads(row)["errors"]["float32"] == 0
