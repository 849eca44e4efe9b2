"""The benchmark of a chip: one part of the command at a tiny size."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.chip import __main__ as chip


def test_the_command_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chip.main(["--tiny", "--only=check xla", f"--out={tmp_path}"]) == 0
    *table, result = capsys.readouterr().out.splitlines()
    assert json.loads(result)["failed"] == []
    assert any(line.startswith("| check |  | xla |") for line in table)
    (row,) = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert json.loads(row)["errors"]["float32"] == 0
