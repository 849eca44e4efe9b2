"""Progress is a bar on a terminal, occasional lines elsewhere, and nothing if quick."""

import io
import re
import sys
import weakref

import pytest

from txl_jax.report import progress
from txl_jax.report.log import say
from txl_jax.report.progress import Progress


@pytest.mark.parametrize("seconds, count", [(10.0, 0), (0.0, 9)])
def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    count: int,
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", seconds)
    with Progress("epoch"), Progress("train", 109, done=100, unit="") as bar:
        for done in range(101, 110):
            bar(done, 0, "3.1k tokens/s", f"loss {done / 100:.2f}")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    for done, line in zip(range(101, 101 + count), lines[2:11], strict=True):
        figures = rf"3.1k tokens/s, loss {done / 100:.2f}, [\d:]+ passed"
        assert re.match(rf"train: +\d+% {done}/109, [\d:]+ left, {figures}$", line)
    assert out == "" and bool(lines) == bool(count)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_progress_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    # A bar of another test that is not closed yet would move this one down.
    monkeypatch.setattr(Progress, "_instances", weakref.WeakSet())
    with Progress("valid") as bar:
        for done in range(1, 10):
            bar(1000 * done, 9000)
        say("a separate line")
    with Progress("train", 400_000, unit="") as bar:
        bar(400_000, 0, "12.3k tok/s", "loss 1.9234", "2.7750 bits/token", "mfu 23.1%")
    shown = terminal.getvalue()
    assert "a separate line\n" in shown and capsys.readouterr().out == ""
    states = shown.replace("\n", "\r").split("\r")
    assert max(map(len, states)) <= columns
    valid, train = ([x for x in states if x.startswith(y)][-1] for y in ("v", "t"))
    assert re.match(r"valid: 100% \|\S+ *\| 9.00k/9.00k, 00:00 left, \d\S+ tok", valid)
    last = {60: "12.3k tok/s", 80: "loss 1.9234", 120: "passed"}[columns]
    assert train.strip().endswith(last), "only whole figures are omitted"
