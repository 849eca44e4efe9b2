"""tpu_vm.sh and tpu_worker.sh, run in full against a stand-in cloud of two machines."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import world

TRAIN = ["--config=experiments/wt103.py", "--workdir=/mnt/txl/wt103"]
FLAGS = "--name=my-run --zone=us-west4-a --accelerator_type=v5litepod-16".split()
FLAGS += ["--nfs=10.0.0.2:/share"]
PACKED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "experiments/wt103.py")


@pytest.fixture
def cloud(tmp_path: Path) -> dict[str, str]:
    """Returns an environment with a small checkout, which is quick to copy."""
    checkout = tmp_path / "checkout"
    shutil.copytree(world.ROOT / "launch", checkout / "launch")
    for name in ("txl_jax", "experiments"):
        (checkout / name).mkdir()
    for name in PACKED:
        shutil.copy(world.ROOT / name, checkout / name)
    environment = world.make(tmp_path, "gcloud", *world.MACHINE)
    return environment | {"CHECKOUT": str(checkout)}


def train(
    cloud: dict[str, str], *flags: str, training: list[str] = TRAIN
) -> subprocess.CompletedProcess[str]:
    return world.run(cloud, "tpu_vm.sh", *FLAGS, *flags, "--", *training)


def verbs(folder: Path) -> list[str]:
    """Returns the verbs of the calls of gcloud, except `describe`."""
    return [call[4] for call in world.calls(folder, "gcloud") if "describe" not in call]


def trained(folder: Path) -> int:
    """Returns the number of training processes that were started."""
    return len(world.calls(folder, "training", "txl_jax.main"))


# Runs that succeed


def test_creates_trains_on_all_workers_and_deletes(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    odd = [
        "--config.generate.prompt=def f(x):\n\treturn  'a' \"b\" $HOME `id` \\ * ; é",
        "--config.data.path=",
        "--config.x=%USER%",
    ]
    result = train(cloud, "--spot", "--project=mine", training=[*TRAIN, *odd])
    assert result.returncode == 0, result.stderr
    assert verbs(tmp_path) == ["create", "ssh", "scp", *["ssh"] * 5, "delete"]
    create = world.calls(tmp_path, "create")[0]
    assert " ".join(create[5:]) == (
        "my-run --node-id=my-run --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --spot --zone=us-west4-a --quiet "
        "--project=mine"
    )
    assert all("--project=mine" in call for call in world.calls(tmp_path, "gcloud"))
    assert sorted(world.calls(tmp_path, "training", "txl_jax.main")) == [
        ["training", place, "-m", "txl_jax.main", *TRAIN, *odd] for place in ("0", "1")
    ]
    for place in ("0", "1"):
        assert f"{place}: training on {place}" in result.stdout.splitlines()


def test_a_preempted_slice_is_created_again_for_the_same_command(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, ("preempted", 75), (0, 0))
    (tmp_path / "bin" / "mount.nfs").symlink_to(world.STANDIN)
    result = train(cloud, "--spot")
    assert result.returncode == 0, result.stderr
    calls = [call[4] for call in world.calls(tmp_path, "queued-resources")]
    changes = [verb for verb in calls if verb != "describe"]
    assert changes == ["create", "delete", "create", "delete"]
    first, second = world.calls(tmp_path, "training", "0")
    assert first == second
    assert not world.calls(tmp_path, "apt-get"), "NFS is installed"


def test_training_restarts_on_the_same_slice_which_is_kept(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    """The request exists at first, but its machines have been deleted."""
    world.plan(tmp_path, (75, 134), (75, 1), (134, 134), (0, 0))
    (tmp_path / "resource").write_text("ACTIVE\n")
    result = train(cloud, "--keep")
    assert result.returncode == 0, result.stderr
    assert len(world.calls(tmp_path, "create")) == 1 and trained(tmp_path) == 8
    assert "restart 3 of at most 100" in result.stderr
    # Each machine mounts the share once.
    mount = ["-t", "nfs", "-o", "nolock,retry=0", "10.0.0.2:/share", "share"]
    mounted = sorted(world.calls(tmp_path, "mounted"))
    assert mounted == [["mounted", place, *mount] for place in ("0", "1")]
    assert len(world.calls(tmp_path, "apt-get", "install", "nfs-common")) == 2
    if os.geteuid():  # root may write anywhere
        modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("share")}
        assert modes == {0o777}
    result = train(cloud, "--keep", "--nfs=10.0.0.3:/share")
    assert result.returncode == 1
    assert "at share: 10.0.0.2:/share is there already" in result.stderr
    assert "--delete ends its costs" in result.stderr
    deleted = len(world.calls(tmp_path, "delete"))
    result = world.run(cloud, "tpu_vm.sh", *FLAGS[:2], "--delete")
    assert result.returncode == 0
    delete = world.calls(tmp_path, "delete")[deleted]
    assert delete[4:7] == ["delete", "my-run", "--force"]


# Training that fails


def test_a_worker_that_hangs_is_killed_and_restarts_are_bounded(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (75, "hangs"), (75, 75), (75, 75))
    (tmp_path / "bin" / "flock").symlink_to(world.STANDIN)
    result = train(cloud, "--max_restarts=1")
    assert result.returncode == 75
    assert "txl_jax-status stuck" in result.stdout
    assert trained(tmp_path) == 4
    assert len(world.calls(tmp_path, "delete")) == 1


GONE = "cannot be mounted at share: mount.nfs: No such file or directory"
MISSING = "cannot be installed: E: Unable to locate package nfs-common"


@pytest.mark.parametrize(
    "share, no_packages, message",
    [
        ("10.0.0.2:/gone", "", f"10.0.0.2:/gone {GONE}"),
        ("10.0.0.2:/share", "1", f"nfs-common {MISSING}"),
    ],
)
def test_a_share_that_cannot_be_mounted_ends_the_run_before_training(
    cloud: dict[str, str], tmp_path: Path, share: str, no_packages: str, message: str
) -> None:
    result = train({**cloud, "NO_PACKAGES": no_packages}, f"--nfs={share}")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    for place in ("0", "1"):
        assert lines.count(f"tpu_worker.sh: worker-{place}: {message}") == 5, "attempts"
    assert "a warning" not in result.stderr
    assert not trained(tmp_path)
    assert len(world.calls(tmp_path, "delete")) == 1, "no more costs"


# For each case: the ends of both processes, the faults of the cloud, the status, a part
# of the message, and the numbers of creations, started processes and deletions.
DONE, TRACKED, ONCE = (0, 0), ("followed 1", "followed 1"), (1, 2, 1)
OUTCOMES: dict[str, tuple[Any, str, int, str, tuple[int, ...]]] = {
    "a mistake": ((2, 75), "", 2, "", ONCE),
    "a person": ((75, 130), "", 130, "", ONCE),
    "no creation at first": (DONE, "create 1\n", 0, "", (2, 2, 1)),
    "no creation": (DONE, "create 1\n" * 3, 1, "my-run cannot be created", (3, 0, 0)),
    "a lost connection": (DONE, "await 255\n", 0, "", ONCE),
    "a connection lost after the start": (TRACKED, "start 255 late\n", 0, "", ONCE),
    "no connection": (DONE, "status 255\n" + "scp 255\n" * 5, 1, "set_up", (1, 0, 1)),
    "no deletion": (DONE, "delete 1\n" * 5, 1, "COULD NOT BE DELETED", (1, 2, 5)),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_failures_of_training_and_cloud(
    cloud: dict[str, str], tmp_path: Path, name: str
) -> None:
    ends, trouble, status, message, counts = OUTCOMES[name]
    world.plan(tmp_path, ends, (1, 1))
    (tmp_path / "trouble").write_text(trouble)
    result = train(cloud)
    assert result.returncode == status, result.stderr
    assert message in result.stderr
    created, deleted = (len(world.calls(tmp_path, x)) for x in ("create", "delete"))
    assert (created, trained(tmp_path), deleted) == counts
    if name == "a mistake":
        assert "1: training on 1" in result.stdout, "the end of the other's log"
    if name == "no connection":
        assert "attempt 5 of 5 failed: set_up" in result.stderr
    if name == "no deletion":
        assert message in result.stderr.splitlines()[-1]


def test_after_an_interruption_the_same_command_follows_the_training(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, ("followed 2", "followed 2"), (1, 1))
    script = str(Path(cloud["CHECKOUT"]) / "launch/tpu_vm.sh")
    # Background jobs of a shell ignore SIGINT, and so would the script.
    reset = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    reset += "os.execvp('bash', sys.argv[1:])"
    command = [sys.executable, "-c", reset, "bash", script, *FLAGS, "--", *TRAIN]
    with subprocess.Popen(
        command, env=cloud, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        world.wait_until(lambda: bool(world.calls(tmp_path, "follow")))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, stderr = process.communicate(timeout=world.LIMIT_SECONDS)
    assert process.returncode == 130
    assert "the same command follows it again" in stderr
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert "is already training" in result.stderr
    assert trained(tmp_path) == 2
    assert len(world.calls(tmp_path, "create")) == 1


# Commands that create nothing


def test_dry_run_prints_the_commands_and_runs_none(tmp_path: Path) -> None:
    environment = world.make(tmp_path)  # without gcloud
    result = train(environment, "--dry_run", training=[*TRAIN, "--config.x=a b"])
    assert result.returncode == 0, result.stderr
    first, *rest = map(shlex.split, result.stdout.splitlines())
    assert first[1:6] == ["exec", ".venv/bin/python", "-m", "txl_jax.main", TRAIN[0]]
    assert first[-1] == "--config.x=a b"
    assert {command[1] for command in rest} == {"gcloud"}
    verbs = [command[5] for command in rest]
    assert verbs == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert "tpu_worker.sh mount 10.0.0.2:/share && " in rest[2][-1]
    # Without a share nothing is mounted.
    for flag, workdir in (("spot", "gs://b/w"), ("keep", "runs/w")):
        words = *FLAGS[:3], f"--{flag}", "--dry_run", "--", f"--workdir={workdir}"
        result = world.run(environment, "tpu_vm.sh", *words, "--config=wt103")
        assert result.returncode == 0, result.stderr
        assert f"--workdir={workdir}" in result.stdout
        assert "mount" not in result.stdout
        assert ("delete" in result.stdout) == (flag == "spot")
    assert not world.calls(tmp_path)


NAME, ZONE, TYPE, NFS = FLAGS
MISTAKES = {
    "--name is missing": [ZONE, TYPE, "--", *TRAIN],
    "--name=My Run is invalid": ["--name=My Run", ZONE, TYPE, "--", *TRAIN],
    "--zone=us-west4 is invalid": [NAME, "--zone=us-west4", TYPE, "--", *TRAIN],
    "give --runtime_version": [NAME, ZONE, "--accelerator_type=v9x-8", "--", *TRAIN],
    "unknown flag '--spto'": [*FLAGS, "--spto", "--", *TRAIN],
    "flags are missing": [*FLAGS],
    "there is no --workdir": [*FLAGS, "--", "--config=wt103"],
    "--nfs=/share is invalid": [*FLAGS, "--nfs=/share", "--", *TRAIN],
    "is on no share: give --nfs": [NAME, ZONE, TYPE, "--keep", "--", *TRAIN],
    "=s3://b/w is deleted": [*FLAGS, "--", "--workdir=s3://b/w"],
    "is lost with a spot": [*FLAGS, "--spot", "--keep", "--", "--workdir=runs/x"],
    "is deleted with the machine": [*FLAGS, "--", "--workdir", "runs/x"],
    "is no experiment": [*FLAGS, "--", "--config=wt104", "--workdir=/mnt/txl/w"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_user_errors_are_one_line(
    cloud: dict[str, str], tmp_path: Path, message: str
) -> None:
    result = world.run(cloud, "tpu_vm.sh", *MISTAKES[message])
    world.assert_mistake(tmp_path, result, message)
