"""Long runs neither recompile nor grow."""

import json
from pathlib import Path

import pytest

from tests.faults.soak import summarize
from tests.support.processes import Processes


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("compilations", 1, "compiled after"),
        ("handles", 2, "open files"),
        ("rss_mb", 1, "memory grows"),
        ("tokens_per_second", -5, "speed"),
    ],
)
def test_failures_are_seen(name: str, change: float, message: str) -> None:
    names = ("compilations", "handles", "rss_mb", "tokens_per_second")
    samples = {each: [100.0] * 1000 for each in names}
    samples[name] = [100.0 + change * (step // 100) for step in range(1000)]
    result = summarize(samples)
    (failure,) = result["failures"] + result["long_failures"] + result["slower"]
    assert message in failure


@pytest.mark.long
def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    """In a process of its own, whose memory is the run's; the speed is not judged."""
    run = Processes(
        tmp_path, "--steps=20000", python=("-m", "tests.faults.soak"), count=1
    )
    run.all[0].wait(3600)
    run.kill()
    lines = run.stdout[0].splitlines()
    assert lines, run.stderr[0].read_text()
    result = json.loads(lines[-1])
    assert result["failures"] + result["long_failures"] == [], result
    assert result["compilations"][-1] > 0, "nothing counts compilations"
