"""Progress is a bar on a terminal, occasional lines elsewhere, and nothing if quick."""

import io
import queue
import sys
from functools import partial

import pytest

from tests.support.processes import LIMIT_SECONDS
from txl_jax.report import log
from txl_jax.report.log import Progress, say, waiting


@pytest.mark.parametrize("seconds, count", [(10.0, 0), (0.0, 9)])
def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    count: int,
) -> None:
    monkeypatch.setattr(log, "EVERY_SECONDS", seconds)
    with Progress("epoch"), Progress("train", 109, done=100) as bar:
        for done in range(101, 110):
            bar(done, loss=f"{done / 100:.2f}", bpc="2.00")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and bool(lines) == bool(count)
    for done, line in zip(range(101, 101 + count), lines[2:11], strict=True):
        assert line.startswith("train: ") and f" {done}/109 [" in line
        assert f"loss {done / 100:.2f} bpc 2.00]" in line


def test_on_a_terminal_progress_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("valid") as bar:
        for done in range(1, 10):
            bar(done, 9, loss="1.92")
        say("a separate line")
    shown = terminal.getvalue()
    assert "9/9" in shown and "loss 1.92" in shown and "a separate line\n" in shown
    assert capsys.readouterr().out == ""


def test_a_long_wait_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    hear = partial(said.get, timeout=LIMIT_SECONDS)
    monkeypatch.setattr(log, "say", said.put)
    monkeypatch.setattr(log, "QUIET_SECONDS", 0.0)
    with pytest.raises(ValueError), waiting("reading"):
        assert hear() == "reading"
        raise ValueError
