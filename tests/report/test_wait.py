"""Long work is told while it lasts; short work is not."""

import re
import time

import pytest

from txl_jax.report import wait
from txl_jax.report.wait import telling_compilation, waiting


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "QUIET_SECONDS", 0.1)


def test_long_work_is_told_while_it_lasts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "EVERY_SECONDS", 0.2)
    with waiting("reading, about 1 s"):
        time.sleep(0.8)
    first, *middle, last = capsys.readouterr().err.splitlines()
    assert first == "reading, about 1 s"
    assert middle and all(line.endswith(" s so far") for line in middle)
    assert re.fullmatch(r"reading: took \d+\.\d s", last)


def test_short_work_is_not_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "QUIET_SECONDS", 60.0)
    with waiting("reading"):
        pass
    assert capsys.readouterr().err == ""


def test_work_that_fails_is_not_told_to_be_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError), waiting("reading"):
        time.sleep(0.5)
        raise ValueError
    assert capsys.readouterr().err == "reading\n"


def test_only_the_first_call_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    def call(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    told = telling_compilation("the step", call)
    assert [told(0.5), told(0.5)] == [0.5, 0.5]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling the step, about 10 s"
    assert lines[1].startswith("compiling the step: took ") and len(lines) == 2
