"""slurm.sbatch, run against stand-ins for Slurm's programs, with two tasks."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch import world

SCRIPT = world.ROOT / "launch" / "slurm.sbatch"
TRAIN = ["--config=wt103", "--workdir=/shared/a b", "--config.data.path='$x'"]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    environment = world.make(tmp_path, "srun", "squeue", "scontrol", "training")
    (tmp_path / "job").write_text("RUNNING")
    environment |= {"PYTHON": "training", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    environment |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS_PER_NODE": "1"}
    return environment | {"SLURM_SUBMIT_DIR": str(world.ROOT)}


def submit(
    cluster: dict[str, str], training: list[str] = TRAIN
) -> subprocess.CompletedProcess[str]:
    return world.run(cluster, "slurm.sbatch", *training)


def test_trains_in_every_task(cluster: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (0, 0))
    result = submit(cluster)
    assert result.returncode == 0, result.stderr
    srun, *trained = world.calls(tmp_path, "training")
    # A task sees all GPUs, and continues when another ends.
    assert {"srun", "--label", "--gpu-bind=none", "--kill-on-bad-exit=0"} <= set(srun)
    assert sorted(trained) == [
        ["training", task, "-m", "txl_jax.main", *TRAIN] for task in ("0", "1")
    ]
    assert "1: training on 1\n" in result.stderr, "stdout goes to the log too"
    assert not world.calls(tmp_path, "requeue")


# The tasks' ends, the job's state, restarts and status, and whether it is requeued.
@pytest.mark.parametrize(
    "case",
    [
        ((75, 75), "RUNNING", "0", 75, True),
        ((75, 1), "RUNNING", "0", 1, True),
        ((76, 76), "RUNNING", "0", 76, False),
        ((75, 75), "CANCELLED", "0", 75, False),
        ((75, 75), "COMPLETING", "0", 75, False),
        ((75, 75), "RUNNING", "100", 75, False),
    ],
)
def test_a_running_job_is_requeued_unless_its_status_is_final(
    cluster: dict[str, str], tmp_path: Path, case: Any
) -> None:
    ends, state, restarts, status, is_requeued = case
    world.plan(tmp_path, ends)
    (tmp_path / "job").write_text(state)
    result = submit({**cluster, "SLURM_RESTART_COUNT": restarts})
    assert result.returncode == status
    requeued = world.calls(tmp_path, "requeue")
    assert requeued == [["scontrol", "requeue", "7"]] * is_requeued
    assert ("submit it again" in result.stderr) == (restarts == "100")


def test_failures_of_slurm_itself(cluster: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (75, 75))
    (tmp_path / "trouble").write_text("requeue 1\ntxl_jax.main 1\n")
    result = submit(cluster)
    assert result.returncode == 75
    assert "submit the same command again" in result.stderr
    assert submit(cluster).returncode == 1, "of srun"
    assert len(world.calls(tmp_path, "requeue")) == 2


MISTAKES: dict[str, dict[str, str]] = {
    "sbatch launch/slurm.sbatch FLAGS": {"SLURM_JOB_ID": ""},
    "there is no none": {"PYTHON": "none"},
    "give --ntasks-per-node=4": {"SLURM_GPUS_ON_NODE": "4"},
    "give --workdir": {},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_user_errors_are_one_line(
    cluster: dict[str, str], tmp_path: Path, message: str
) -> None:
    training = TRAIN if MISTAKES[message] else ["--config=wt103"]
    result = submit({**cluster, **MISTAKES[message]}, training)
    world.assert_mistake(tmp_path, result, message)


def test_the_directives() -> None:
    text = SCRIPT.read_text()
    assert text.startswith("#!/")
    # sbatch reads no directive after the first command.
    head = text.partition("\nset -euo pipefail")[0]
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.M))
    assert text.count("\n#SBATCH") == len(directives)
    assert directives["signal"] == "TERM@300", "to the tasks, not to B: this script"
    assert directives["requeue"] == ""
    assert directives["open-mode"] == "append"
    assert directives["ntasks-per-node"] == directives["gpus-per-node"]
