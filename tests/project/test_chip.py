"""The first contact with a chip: every part at a tiny size, and every way to fail."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.benchmarks.chip import __main__ as chip
from experiments.benchmarks.chip import (
    attention,
    machine,
    plan,
    process,
    rows,
    steps,
    timing,
)
from txl_jax.kernels import xla
from txl_jax.kernels.operands import Operands

Row = dict[str, Any]
FACTS: Row = {"device_kind": "TPU v4", "count": 1, "versions": {}, "platform": "tpu"}
FACTS |= {"torch": "not installed"}


def in_process(part: Row, limit: float) -> Row:
    """Measures a part as its own process does, without starting one."""
    kinds = {"machine": machine.measure, "check": attention.measure}
    kinds |= steps.MEASURES
    *_, result = kinds[part["part"]](part)
    timed = {"seconds_taken": 1.0, "timed_out": False}
    return {**part, "result": result, "error": "", **timed}


def test_a_tiny_run_has_a_page_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "run", in_process)
    monkeypatch.setattr(timing, "patience", 0.01)
    monkeypatch.setattr(plan, "SHAPES_ON_CPU", ("ptb",))
    monkeypatch.setattr(sys, "argv", ["chip", "--tiny", f"--out={tmp_path}"])
    chip.main()
    result = json.loads(capsys.readouterr().out)
    assert (result["left"], result["failed"], result["faults"]) == (0, [], [])
    assert min(result["tokens_per_second"].values()) > 0
    text = (tmp_path / "page.md").read_text("utf-8")
    assert text.count("| agrees |") == 10 and "`ptb` | generate" in text
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == result["parts"]
    monkeypatch.setattr(plan, "ON_CPU", ())
    chip.main()
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == result["parts"] + 1, "only the machine is looked at again"


def test_a_wrong_kernel_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(operands: Operands) -> jax.Array:
        bias_HR: Any = operands.position.bias_HR
        position = operands.position._replace(bias_HR=bias_HR * 1.01)
        return xla.rel_attention(operands._replace(position=position))

    part = {"part": "check", "kernel": "tpu", "shape": [2, 2, 5, 3, 4, 8]}
    part |= {"terms": "alibi"}
    monkeypatch.setitem(attention.dispatch.KERNELS, "tpu", wrong)
    *_, result = attention.measure(part)
    assert "float32 at [2, 2, 5, 3, 4, 8] alibi" in result["fault"]
    assert rows.is_fault(part | {"result": result})


@pytest.mark.parametrize(
    ("program", "result", "error"),
    [
        ("print('{\"a\": 1}'); print('{\"err')", {"a": 1}, ""),
        ("print('{\"a\": 1}', flush=True); time.sleep(99)", {"a": 1}, "no end within"),
        ("sys.exit('no chip')", {}, "ended with status 1: no chip"),
        ("os.kill(os.getpid(), 11)", {}, "ended with status -11"),
        ('print(\'{"error": "OOM"}\')', {}, "OOM"),
    ],
)
def test_a_failed_part_is_recorded(
    program: str, result: Row, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", f"import os, sys, time; {program}"]
    monkeypatch.setattr(process, "COMMAND", command)
    row = process.run({"part": "check"}, 5 if "sleep" in program else 60)
    assert row["result"] == result and row["error"].startswith(error)
    assert row["timed_out"] == (error == "no end within")


def test_rows_of_other_code_do_not_count(tmp_path: Path) -> None:
    path, part = tmp_path / "rows.jsonl", {"part": "train", "experiment": "ptb"}
    file = rows.File(path, FACTS, retry=False)
    file.add(part | {"result": {}, "error": "INTERNAL"})
    path.write_text(path.read_text("utf-8") + '{"half": ', "utf-8")
    again = rows.File(path, FACTS, retry=False)
    assert again.find(part) and not again.find(part | {"dtype": "float32"})
    assert not rows.File(path, FACTS, retry=True).find(part)
    assert not rows.File(path, FACTS | {"count": 2}, retry=False).find(part)


def test_every_published_config_is_planned_for_an_accelerator() -> None:
    parts = plan.plan(FACTS | {"torch": "TPU"}, tiny=False)
    titles = [plan.title(part) for part in parts]
    assert len(set(titles)) == len(titles)
    planned = {(part["part"], part.get("experiment")) for part in parts}
    for kind in ("train", "most", "evaluate", "generate"):
        assert {(kind, name) for name in plan.EXPERIMENTS} <= planned
    assert {part["kernel"] for part in parts if "shape" in part} == {
        *("xla", "chunked", "tpu")
    }
    assert {part["dtype"] for part in parts} == {"bfloat16"}
