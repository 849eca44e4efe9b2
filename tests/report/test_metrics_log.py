"""metrics.jsonl has each step once, and is on disk before a checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from txl_jax.report import timing
from txl_jax.report.log import say
from txl_jax.report.metrics_log import MetricsLog, read_metrics
from txl_jax.report.viewers import Events

ZERO = dict.fromkeys(timing.PURPOSES, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def update(step: int) -> dict[str, Any]:
    """Returns the metrics of one update, in the form of train.fetch."""
    return {"loss": 1 / step, "tokens": 64, "lr": 1e-3, "skipped": False}


def run(
    path: Path, last_step: int, steps: range, every: int = 1, num_steps: int = 100
) -> None:
    """Logs the updates of `steps`, one per call, and writes them to disk."""
    with MetricsLog(path, last_step, num_steps, every) as log:
        for step in steps:
            log.append([update(step)])
        log.sync()


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_non_finite_numbers_are_null_in_json(path: Path) -> None:
    bad = update(1) | {"loss": float("nan"), "grad_norm": float("-inf")}
    with MetricsLog(path, 0, 100, 1) as log:
        log.append([bad])
        log.log_validation(float("inf"))
    line, validation = read_metrics(path)
    assert line["exact"] == update(1) | {"loss": None, "grad_norm": None}
    assert validation["exact"] == {"valid_nll": None}


def timing_of(*values: Any) -> dict[str, Any]:
    names = "step_seconds input_wait_seconds tokens_per_second mfu total_seconds"
    return dict(zip(names.split(), values, strict=True))


def test_a_line_has_step_exact_and_timing(path: Path, clock: SimpleNamespace) -> None:
    def batches() -> Iterator[int]:
        clock.now += 1
        yield 0

    with MetricsLog(path, 0, 100, 1, ideal_seconds=0.25) as log:
        clock.now += 1
        assert next(log.timing.inputs(batches())) == 0
        log.append([update(1), update(2)])
        with log.timing.spend("evaluation"):
            clock.now += 450
        log.sync()
        with log.timing.spend("checkpoint"):
            clock.now += 50
        clock.now += 4
        log.append([update(3)])
        log.sync()
    first, second, third = read_metrics(path)
    times = [line["timing"].pop("time") for line in (first, second, third)]
    assert times == sorted(times) and times[0].endswith("+00:00")
    assert first["exact"] == update(1) and third["exact"] == update(3)
    assert (first["step"], set(first)) == (1, {"step", "exact", "timing"})
    # The two updates of a call share its time.
    total = ZERO | {"update": 1.0, "input": 1.0}
    assert first["timing"] == timing_of(1.0, 0.5, 64.0, 0.25, total)
    assert second["timing"] == first["timing"]
    total |= {"update": 5.0, "checkpoint": 50.0, "evaluation": 450.0}
    assert third["timing"] == timing_of(4.0, 0.0, 16.0, 1 / 16, total)


def test_totals_continue_when_a_run_resumes(path: Path, clock: SimpleNamespace) -> None:
    for steps in (range(1, 4), range(3, 5)):  # update 3 is lost and repeated
        with MetricsLog(path, steps[0] - 1, 100, 1) as log:
            with log.timing.spend("compile"):
                clock.now += 7
            for k in steps:
                clock.now += 2
                log.append([update(k)])
            log.sync()
    last = read_metrics(path)[-1]["timing"]["total_seconds"]
    assert (last["compile"], last["update"]) == (14.0, 2 * 2 + 2 * 2)


def test_lines_are_on_disk_before_a_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    with MetricsLog(path, 0, 100, 1) as log:
        log.append([update(1), update(2)])
        log.log_validation(1.25)
        monkeypatch.setattr(
            os, "fsync", lambda file: forced.append(os.fstat(file).st_size)
        )
        log.sync()
        assert steps_in(path) == [1, 2, 2] and forced == [path.stat().st_size]
    assert read_metrics(path)[2]["exact"] == {"valid_nll": 1.25}


def test_when_lines_are_written(path: Path, clock: SimpleNamespace) -> None:
    """A line's timing covers all updates since the previous line."""
    with MetricsLog(path, 0, 11, 4) as log:
        for step in range(1, 12):
            clock.now += step
            log.append([update(step)])
    assert steps_in(path) == [4, 8, 11]
    seconds = [line["timing"]["step_seconds"] for line in read_metrics(path)]
    assert seconds == [(1 + 2 + 3 + 4) / 4, (5 + 6 + 7 + 8) / 4, (9 + 10 + 11) / 3]


def test_a_resume_cuts_lines_newer_than_the_checkpoint(path: Path) -> None:
    run(path, 0, range(1, 7))
    before = path.read_text().splitlines()
    with MetricsLog(path, 4, 100, 1):
        assert path.read_text().splitlines() == before[:4]
    with path.open("a") as file:
        file.write(before[4][:-4])  # a kill may leave half a line
    run(path, 4, range(5, 9))
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert path.read_text().splitlines()[:4] == before[:4]
    run(path, 0, range(1, 3))
    assert steps_in(path) == [1, 2], "a fresh run starts an empty file"


def test_lines_that_are_not_metrics_are_left_out(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(path, 0, range(1, 7))
    good = path.read_text().splitlines()
    bad = [good[0], good[1][:-1], "[]", '{"step": 3}', good[3]]
    path.write_text("\n".join(bad) + "\n" + good[4][:5])
    with MetricsLog(path, 5, 10, 1):
        assert steps_in(path) == [1, 4]
    path.unlink()
    with MetricsLog(path, 5, 10, 1):
        assert path.read_text() == ""
    assert "lacks the updates up to 5" in capsys.readouterr().err


@pytest.mark.parametrize("has_validation", [False, True])
def test_a_validation_that_is_repeated_is_logged_once(
    path: Path, has_validation: bool
) -> None:
    """A kill may come between the line and the checkpoint that has its loss."""
    with MetricsLog(path, 0, 100, 1) as log:
        log.append([update(1)])
        log.log_validation(1.5)
    before = path.read_text()
    with MetricsLog(path, 1, 100, 1, has_validation=has_validation) as log:
        if not has_validation:
            assert steps_in(path) == [1]
            log.log_validation(1.5)
    lines, old = path.read_text().splitlines(), before.splitlines()
    assert lines[0] == old[0] and steps_in(path) == [1, 1]
    assert read_metrics(path)[1]["exact"] == {"valid_nll": 1.5}


def test_only_the_first_process_writes(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("txl_jax.runtime.distributed.is_first", lambda: False)
    run(path, 0, range(1, 4))
    say("a line")
    with Events(path.parent, 0) as events:
        events.scalars(1, {"train/loss": 1.0})
    assert not list(path.parent.iterdir()) and capsys.readouterr().err == ""
