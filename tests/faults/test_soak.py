"""A run of hours is one of minutes, many times: the soak, small and whole."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.soak import Sample, Soaked, soak

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_short_run_compiles_once_and_leaks_no_file(tmp_path: Path) -> None:
    soaked = soak(400, tmp_path)
    assert soaked.compilations()[0] > 0, "it counts"
    assert len(soaked.samples) == len(soaked.speed) == 400
    assert soaked.failures() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compilations": 1}, "compiled after"),
        ({"handles": 2}, "open files"),
        ({"rss_mb": 1}, "memory grows"),
        ({"speed": -1}, "speed"),
    ],
    ids=str,
)
def test_what_is_wrong_is_seen(change: dict[str, int], message: str) -> None:
    def at(step: int, name: str) -> int:
        return change.get(name, 0) * (step // 100)

    def sample(step: int) -> Sample:
        names = ("rss_mb", "handles", "compilations")
        rss_mb, handles, compilations = (100 + at(step, name) for name in names)
        return Sample(step, rss_mb, handles, compilations)

    soaked = Soaked(
        [sample(step) for step in range(1000)],
        [float(50 + 5 * at(step, "speed")) for step in range(1000)],
    )
    (failure,) = soaked.failures() + soaked.long_failures()
    assert message in failure


@pytest.mark.long
def test_a_long_run_neither_grows_nor_slows_down() -> None:
    """In a process of its own, whose memory is the run's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--steps=20000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
