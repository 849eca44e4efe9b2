"""The benchmark of a chip: every kind of part at a tiny size, and every failure."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.benchmarks.chip import __main__ as chip
from experiments.benchmarks.chip import measure
from experiments.benchmarks.record import Row
from txl_jax.kernels import dispatch, xla
from txl_jax.kernels.operands import Operands

GPU: Row = {"device_kind": "NVIDIA H200", "platform": "gpu"}
TINY: Row = {"dtype": "float32", "tiny": True, "trace": False, "kernel": "xla"}


def make_args(**changes: Any) -> argparse.Namespace:
    plain = {"tiny": True, "trace": False, "only": "", "original": ""}
    return argparse.Namespace(**plain | changes)


def test_every_kernel_and_size_is_planned_for_a_gpu() -> None:
    parts = chip.plan(GPU, make_args(tiny=False, original="transformer-xl/pytorch"))
    titles = [chip.title(part) for part in parts]
    assert len(set(titles)) == len(titles) and len(titles) < 45
    assert {part["dtype"] for part in parts} == {"bfloat16"}
    for each in chip.TRAINING:
        tried = {
            (part["kernel"], part["unroll"])
            for part in parts
            if each.items() <= part.items() and part["task"] == "train"
            if "original" not in part
        }
        kernels = chip.kernels(GPU, each["experiment"] in chip.HAVE_DROPATT)
        assert tried == {
            (kernel, unroll) for kernel in kernels for unroll in ("all", 1)
        }
    assert "train enwik8 torch.compile of the original code" in titles
    assert len(chip.plan(GPU, make_args(only="wt103_nvidia_large"))) == 6


@pytest.mark.parametrize(
    "part",
    [
        {"task": "train", **chip.TRAINING[3], "unroll": "all", "trace": True},
        {"task": "train", **chip.TRAINING[1], "unroll": 1},
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
    facts = {"date": "", "versions": {}, "peak_flops": 1e12, "product_flops": 1e11}
    lines = chip.page([row], GPU | facts).splitlines()
    (cells,) = (line for line in lines if line.startswith(f"| {part['task']}"))
    assert cells.count("|") == len(chip.HEAD) + 1


def test_a_check_states_errors_and_finds_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = {"task": "check", **TINY, "kernel": "chunked"}
    errors = measure.check_kernel(part)()["errors"]
    assert 0 < errors["float32"] < 1e-5 < errors["bfloat16"]

    def wrong(operands: Operands) -> jax.Array:
        w_HA: Any = operands.position.w_HA
        position = operands.position._replace(w_HA=w_HA * 1.01)
        return xla.rel_attention(operands._replace(position=position))

    monkeypatch.setitem(dispatch.KERNELS, "chunked", wrong)
    with pytest.raises(ValueError, match=r"off by .* \(float32, 2 x 2 x 6 x 4"):
        measure.check_kernel(part)


READY = "print('{\"compile_seconds\": 1}', flush=True); "
TURN = READY + "sys.stdin.read(); "


def test_parts_wait_for_their_turn_and_each_way_to_fail_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "turns"
    programs = {
        "a": TURN + "print(log.write_text('a') and '{\"result\": {\"x\": 1}}')",
        "b": TURN + "print(json.dumps({'result': {'after': log.read_text()}}))",
        "noise": "print('words'); print('{\"err'); " + TURN + "sys.exit('no chip')",
        "crash": "os.kill(os.getpid(), 11)",
        "error": 'print(\'{"error": "OOM"}\')',
        "slow": "time.sleep(99)",
        "hang": READY + "time.sleep(99)",
    }
    start = "import json, os, pathlib, sys, time; "
    start += f"log = pathlib.Path({str(log)!r}); "
    start += "part = json.loads(sys.argv[1].partition('=')[2]); exec(part['program'])"
    monkeypatch.setattr(chip, "COMMAND", [sys.executable, "-c", start])
    monkeypatch.setattr(chip, "MOST_SECONDS", 1)
    parts = [{"task": name, "program": text} for name, text in programs.items()]
    began = time.monotonic()
    args = argparse.Namespace(out=tmp_path)
    rows = {row["task"]: row for row in chip.run(parts, args, 30, jobs=7)}
    assert time.monotonic() - began < 60
    assert rows["a"]["x"] == 1 and rows["b"]["after"] == "a"
    errors = {name: row["error"] for name, row in rows.items()}
    assert errors.pop("a") == errors.pop("b") == ""
    assert errors.pop("noise") == "ended with status 1: no chip"
    assert errors.pop("crash").startswith("ended with status -11")
    assert errors == {
        "error": "OOM",
        "slow": "not compiled in time",
        "hang": "no end within 1 s",
    }


def test_the_command_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chip.main(["--tiny", "--only=check xla", f"--out={tmp_path}"]) == 0
    *table, result = capsys.readouterr().out.splitlines()
    assert json.loads(result)["failed"] == []
    assert any(line.startswith("| check |  | xla |") for line in table)
    (row,) = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert json.loads(row)["errors"]["float32"] == 0
    for wrong in (f"--out={__file__}", f"--original={tmp_path}"):
        assert chip.main([f"--out={tmp_path}", wrong]) == 2
