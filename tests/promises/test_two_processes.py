"""Two processes make one run: any may be told to end or die, and no update is lost."""

import json
import signal
from pathlib import Path

import pytest

from tests.processes import Processes, has_step, write_experiment
from txl_jax.main import main
from txl_jax.report.writer import read_metrics


def saved(workdir: Path) -> list[int]:
    """Returns the steps that have a whole checkpoint."""
    done = (workdir / "checkpoints").glob("*/commit_success.txt")
    return sorted(int(path.parent.name) for path in done)


def losses(workdir: Path) -> list[float]:
    return [line["exact"]["loss"] for line in read_metrics(workdir / "metrics.jsonl")]


def test_a_signal_and_a_death_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM to one, then the death of one; what goes on may be a single process.

    It has eight devices instead of two times two, and makes the same numbers.
    """
    tiny, ended = write_experiment(tmp_path), tmp_path / "ended"
    flags = [f"--config={tiny}", f"--workdir={ended}"]

    run = Processes(tmp_path, *flags)
    run.until(has_step(ended, 20))
    run.all[1].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    (step,) = saved(ended)
    assert step == len(losses(ended)) >= 20
    line = f"txl_jax: ended at update {step}, which is saved; the same command goes on"
    assert run.said(0) == [line] and run.said(1) == []
    described = json.loads((ended / "run.json").read_text())
    assert (described["process_count"], described["device_count"]) == (2, 4)

    run = Processes(tmp_path, *flags)
    run.until(has_step(ended, step + 10))
    run.all[1].kill()
    assert run.wait() == [75, -signal.SIGKILL]
    (line,) = run.said(0)
    assert line.startswith("txl_jax[0]: another process is lost (")
    assert "resumed at update" in run.stderr[0].read_text()

    last = max(saved(ended)) + 10
    straight = tmp_path / "straight"
    for workdir in (ended, straight):
        more = [f"--config.train.num_steps={last}", f"--config.train.eval_every={last}"]
        assert main([flags[0], f"--workdir={workdir}", *more]) == 0
    assert "resumed at update" in capsys.readouterr().err
    assert losses(ended) == pytest.approx(losses(straight), rel=1e-5)
