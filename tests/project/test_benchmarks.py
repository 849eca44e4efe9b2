"""Benchmarks start, and report nothing on a loaded machine."""

import json
import os

import pytest

from experiments.benchmarks import compare, pods, quiet, record
from tests.project.conftest import EXPERIMENTS, Start

PROGRAMS = {
    f"{folder}.{path.stem}": path
    for folder in ("benchmarks", "figures", "recipes", "rl")
    for path in sorted((EXPERIMENTS / folder).glob("*.py"))
    if "__main__" in path.read_text("utf-8")
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_the_first_line_of_the_docstring(
    name: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(name, "--help") == 0
    docstring = PROGRAMS[name].read_text("utf-8").split('"""')[1]
    assert docstring.splitlines()[0] in capsys.readouterr().out


def test_a_loaded_machine_is_refused_or_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(quiet, "matmul_rates", lambda: {"jax": lambda: 100.0})
    flags = "--models small --tiny --repeats=2 --gradient_segments 1 2"
    assert start("benchmarks.step", flags) == 2
    out, err = capsys.readouterr()
    message = "step: not measured: the load average is 1.50, above 1.0 (--force)"
    assert (out, err) == ("", f"txl_jax: {message}\n")
    start("benchmarks.step", f"{flags} --force")
    result = json.loads(capsys.readouterr().out)
    assert result["loaded"] and result["load_average"] == 1.5
    assert result["command"].endswith(f"step {flags} --force")
    (case,) = result["cases"]
    for side in case["sides"].values():
        assert len(side["seconds"]) == 2 and side["temporary_bytes"] > 0
    rows = compare.table_rows("step", result)
    assert len(rows) == 2 and all("(loaded)" in row for row in rows)
    assert {row.count("|") for row in rows} == {compare.HEADER.count("|")}


def test_dtypes_and_unrolled_layers_are_compared(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quiet, "matmul_rates", lambda: {"jax": lambda: 100.0})
    flags = "--models ptb --dtypes --tiny --force --repeats=1 --updates=1"
    assert start("benchmarks.step", flags) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert {*case["sides"]} == {
        f"{x}, {y}" for x in ("float32", "bfloat16") for y in ("a scan", "unrolled")
    }


@pytest.mark.long
def test_all_benchmarks_work(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    assert start("benchmarks.compare", "--tiny --force --repeats=1") == 0
    out = capfd.readouterr().out
    assert all(f"| {name}" in out for name in compare.PROGRAMS)


def test_the_page_is_made_from_the_committed_rows() -> None:
    rows = record.read_rows(pods.LINES)
    assert pods.PAGE.read_text("utf-8") == pods.page(rows)
