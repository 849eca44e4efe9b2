"""slurm.sbatch, run against stand-ins for Slurm's programs, with two tasks."""

import re
from pathlib import Path

import pytest

from tests.launch import world

SCRIPT = world.ROOT / "launch" / "slurm.sbatch"
TRAIN = ["--config=wt103", "--workdir=/shared/a b", "--config.data.path='$x'"]


def make(folder: Path) -> dict[str, str]:
    """Returns the environment of a job."""
    environment = world.make(folder, "srun", "squeue", "scontrol", "training")
    environment |= {"PYTHON": "training", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    environment |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS_PER_NODE": "1"}
    return environment | {"SLURM_SUBMIT_DIR": str(world.ROOT)}


@pytest.mark.parametrize(
    "ends, restarts, status, is_requeued",
    [
        ((0, 0), "0", 0, False),
        ((75, 1), "0", 1, True),
        ((76, 76), "0", 76, False),
        ((75, 75), "100", 75, False),
    ],
)
def test_a_job_is_requeued_unless_its_status_is_final(
    tmp_path: Path, ends: tuple[int, ...], restarts: str, status: int, is_requeued: bool
) -> None:
    environment = make(tmp_path) | {"SLURM_RESTART_COUNT": restarts}
    world.plan(tmp_path, ends)
    result = world.run(environment, "slurm.sbatch", *TRAIN)
    assert result.returncode == status
    requeued = world.calls(tmp_path, "requeue")
    assert requeued == [["scontrol", "requeue", "7"]] * is_requeued
    assert ("submit it again" in result.stderr) == (restarts == "100")
    srun, *trained = sorted(world.calls(tmp_path, "training"))
    # A task sees all GPUs, and continues when another ends.
    assert {"--label", "--gpu-bind=none", "--kill-on-bad-exit=0"} <= set(srun)
    assert trained == [
        ["training", task, "-m", "txl_jax.main", *TRAIN] for task in ("0", "1")
    ]


def test_a_user_error_is_one_line(tmp_path: Path) -> None:
    result = world.run(make(tmp_path), "slurm.sbatch", "--config=wt103")
    world.assert_mistake(tmp_path, result, "give --workdir")


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
