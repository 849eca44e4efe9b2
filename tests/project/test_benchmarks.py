"""Benchmarks start, alternate, and report nothing on a loaded machine."""

import itertools
import json
import os
from pathlib import Path

import pytest

from experiments.benchmarks import compare, pods, quiet, record
from experiments.benchmarks.quiet import LoadedError, Watch
from tests.project.conftest import EXPERIMENTS, Start

PROGRAMS = {
    f"{folder}.{path.stem}": path
    for folder in ("benchmarks", "figures", "recipes", "rl")
    for path in sorted((EXPERIMENTS / folder).glob("*.py"))
    if "__main__" in path.read_text("utf-8")
}


def make_watch(*rates: float) -> Watch:
    """Returns a watch whose product runs at these rates in sequence."""
    remaining = iter(rates)
    return Watch(False, {"jax": lambda: next(remaining)}, lambda: 0.5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_the_first_line_of_the_docstring(
    name: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(name, "--help") == 0
    docstring = PROGRAMS[name].read_text("utf-8").split('"""')[1]
    assert docstring.splitlines()[0] in capsys.readouterr().out


def test_a_loaded_machine_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert start("benchmarks.generation", "--tiny --repeats=1") == 2
    out, err = capsys.readouterr()
    message = "generation: not measured: the load average is 1.50, above 1.0 (--force)"
    assert (out, err) == ("", f"txl_jax: {message}\n")


def test_a_forced_report_is_marked(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(quiet, "matmul_rates", lambda: {"jax": lambda: 100.0})
    flags = "--models small --tiny --force --repeats=2 --gradient_segments 1 2"
    start("benchmarks.step", flags)
    result = json.loads(capsys.readouterr().out)
    assert result["loaded"] and result["load_average"] == 1.5
    assert result["command"].endswith(f"step {flags}")
    (case,) = result["cases"]
    for side in case["sides"].values():
        assert len(side["seconds"]) == 2 and side["temporary_bytes"] > 0
    rows = compare.table_rows("step", result)
    assert len(rows) == 2 and all("(loaded)" in row for row in rows)
    assert {row.count("|") for row in rows} == {compare.HEADER.count("|")}


def turns(watch: Watch, repeats: int) -> list[float]:
    """Returns the turns that count, as numbered by a fake clock."""
    counter = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quiet, "clock", lambda call: next(counter))
        return quiet.alternate({"a": lambda: None}, repeats, watch)["a"].seconds


def test_turns_next_to_a_slow_product_are_repeated() -> None:
    watch = make_watch(100, 79, 100, 81, 100)
    # The first call is number 0; the first two turns are next to the slow product.
    assert turns(watch, 2) == [3, 4]
    assert watch.describe()["turns_retaken"] == 2 and not watch.describe()["loaded"]
    message = "4 of 4 turns do not count, .* 79.0 and at 100.0 GFLOP/s"
    with pytest.raises(LoadedError, match=message):
        turns(make_watch(100, *[79, 100] * 2), 1)


@pytest.mark.long
def test_all_benchmarks_work(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    assert start("benchmarks.compare", "--tiny --force --repeats=1") == 0
    out = capfd.readouterr().out
    assert all(f"| {name}" in out for name in compare.PROGRAMS)


def test_the_page_is_made_from_the_committed_rows() -> None:
    rows = record.read_rows(pods.LINES)
    assert pods.PAGE.read_text("utf-8") == pods.page(rows)


def test_only_missing_rows_are_measured(tmp_path: Path) -> None:
    """Half a row, left by a kill, counts as missing and spoils no other row."""
    lines, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    measured = []

    def measure(row: record.Row) -> record.Row:
        measured.append(row["a"])
        return row | {"b": 0}

    def fill(most: int) -> list[record.Row]:
        wanted = [{"a": n} for n in range(4)]
        record.fill(lines, page, lambda rows: str(len(rows)), wanted, measure, most)
        assert page.read_text() == str(len(record.read_rows(lines)))
        return record.read_rows(lines)

    assert record.read_rows(lines) == [] and fill(0) == []
    assert fill(2) == [{"a": 0, "b": 0}, {"a": 1, "b": 0}]
    lines.write_text(lines.read_text("utf-8") + '{"a": 2', "utf-8")
    assert [row["a"] for row in fill(9)] == measured == [0, 1, 2, 3]
