"""tpu_vm.sh: what it would run, user errors, and a preemption on a stand-in cloud."""

import shlex
from pathlib import Path

import pytest

from tests.launch import world

TRAIN = ["--config=experiments/wt103.py", "--workdir=gs://b/w", "--config.x=a b"]
FLAGS = "--name=my-run --zone=us-west4-a --accelerator_type=v5litepod-16".split()


def test_dry_run_prints_the_commands_and_runs_none(tmp_path: Path) -> None:
    environment = world.make(tmp_path)  # without gcloud
    share = "--nfs=10.0.0.2:/share", "--dry_run"
    train = TRAIN[0], "--workdir=/mnt/txl/w", TRAIN[2]
    result = world.run(environment, "tpu_vm.sh", *FLAGS, *share, "--", *train)
    assert result.returncode == 0, result.stderr
    first, *rest = map(shlex.split, result.stdout.splitlines())
    assert first[1:] == ["exec", ".venv/bin/python", "-m", "txl_jax.main", *train]
    assert {command[1] for command in rest} == {"gcloud"}
    verbs = [command[5] for command in rest]
    assert verbs == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert "tpu_worker.sh mount 10.0.0.2:/share && " in rest[2][-1]
    # Without a share nothing is mounted.
    for flag, workdir in (("spot", "gs://b/w"), ("keep", "runs/w")):
        words = *FLAGS, f"--{flag}", "--project=mine", "--dry_run", "--"
        result = world.run(environment, "tpu_vm.sh", *words, f"--workdir={workdir}")
        assert result.returncode == 0, result.stderr
        assert f"--workdir={workdir}" in result.stdout
        assert "mount" not in result.stdout
        assert ("delete" in result.stdout) == (flag == "spot")
        create = shlex.split(result.stdout.splitlines()[1])
        assert " ".join(create[6:]) == (
            "my-run --node-id=my-run --accelerator-type=v5litepod-16 "
            f"--runtime-version=v2-alpha-tpuv5-lite {'--spot ' * (flag == 'spot')}"
            "--zone=us-west4-a --quiet --project=mine"
        )


def test_a_preempted_slice_is_created_again_for_the_same_command(
    tmp_path: Path,
) -> None:
    environment = world.make(tmp_path, "gcloud", "python3", "curl", "training")
    world.plan(tmp_path, ("preempted", 75), (0, 0))
    result = world.run(environment, "tpu_vm.sh", *FLAGS, "--spot", "--", *TRAIN)
    assert result.returncode == 0, result.stderr
    calls = world.calls(tmp_path, "queued-resources")
    changes = [call[4] for call in calls if "describe" not in call]
    assert changes == ["create", "delete", "create", "delete"]
    assert sorted(world.calls(tmp_path, "training")) == [
        ["training", place, "-m", "txl_jax.main", *TRAIN] for place in "0011"
    ]
    assert {"0: training on 0", "1: training on 1"} <= {*result.stdout.splitlines()}


NAME, ZONE, TYPE = FLAGS
MISTAKES = {
    "--name=My Run is invalid": ["--name=My Run", ZONE, TYPE, "--", *TRAIN],
    "give --runtime_version": [NAME, ZONE, "--accelerator_type=v9x-8", "--", *TRAIN],
    "unknown flag '--spto'": [*FLAGS, "--spto", "--", *TRAIN],
    "there is no --workdir": [*FLAGS, "--", "--config=wt103"],
    "is on no share: give --nfs": [*FLAGS, "--", "--workdir=/mnt/txl/w"],
    "is lost with a spot": [*FLAGS, "--spot", "--keep", "--", "--workdir=runs/x"],
    "is deleted with the machine": [*FLAGS, "--", "--workdir", "runs/x"],
    "is no experiment": [*FLAGS, "--", "--config=wt104", "--workdir=gs://b/w"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_user_errors_are_one_line(tmp_path: Path, message: str) -> None:
    environment = world.make(tmp_path, "gcloud")
    result = world.run(environment, "tpu_vm.sh", *MISTAKES[message])
    world.assert_mistake(tmp_path, result, message)
