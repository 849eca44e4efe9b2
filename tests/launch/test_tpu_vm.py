"""tpu_vm.sh and tpu_worker.sh, run whole against a stand-in cloud of two machines."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import world

TRAIN = ["--config=experiments/wt103.py", "--workdir=/mnt/txl/wt103"]
FLAGS = [
    "--name=my-run",
    "--zone=us-west4-a",
    "--accelerator_type=v5litepod-16",
    "--nfs=10.0.0.2:/share",
]


@pytest.fixture
def cloud(tmp_path: Path) -> dict[str, str]:
    return world.make(tmp_path, "gcloud", *world.MACHINE)


def train(
    cloud: dict[str, str], *flags: str, training: list[str] = TRAIN
) -> subprocess.CompletedProcess[str]:
    return world.run(cloud, "tpu_vm.sh", *FLAGS, *flags, "--", *training)


def test_creates_trains_on_all_workers_and_deletes(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    result = train(cloud, "--spot", "--project=mine")
    assert result.returncode == 0, result.stderr
    verbs = [
        call[4] for call in world.calls(tmp_path, "gcloud") if "describe" not in call
    ]
    assert verbs == ["create", "ssh", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    create = world.calls(tmp_path, "create")[0]
    assert create[5:] == [
        "my-run",
        "--node-id=my-run",
        "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--spot",
        "--zone=us-west4-a",
        "--quiet",
        "--project=mine",
    ]
    assert all("--project=mine" in call for call in world.calls(tmp_path, "gcloud"))
    trained = sorted(world.calls(tmp_path, "training"))
    assert trained == [
        ["training", place, "-m", "txl_jax.main", *TRAIN] for place in ("0", "1")
    ]
    assert "training on 0" in result.stdout, "the log is followed"


def test_any_flag_arrives_as_it_was_given(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    odd = [
        "--config.generate.prompt=def f(x):\n\treturn  'a' \"b\" $HOME `id` \\ * ; é",
        "--config.data.path=",
        "--config.x=%USER%",
    ]
    assert train(cloud, training=[*TRAIN, *odd]).returncode == 0
    for call in world.calls(tmp_path, "training", "txl_jax.main"):
        assert call[4:] == [*TRAIN, *odd]


def test_a_preempted_slice_is_created_anew_and_the_same_command_run(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, ("preempted", 75), (0, 0))
    result = train(cloud, "--spot")
    assert result.returncode == 0, result.stderr
    verbs = [call[4] for call in world.calls(tmp_path, "queued-resources")]
    acts = [verb for verb in verbs if verb != "describe"]
    assert acts == ["create", "delete", "create", "delete"]
    first, second = world.calls(tmp_path, "training", "0")
    assert first == second


def test_a_slice_that_somebody_deleted_is_created_anew(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    (tmp_path / "resource").write_text("ACTIVE\n")  # with no node any more
    assert train(cloud).returncode == 0
    assert len(world.calls(tmp_path, "create")) == 1


def test_again_goes_on_where_the_slice_is_still_there(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (75, 134), (75, 75), (0, 0))
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert len(world.calls(tmp_path, "create")) == 1
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 6
    assert "restart 2 of at most 100" in result.stderr


@pytest.mark.parametrize(
    "ends, status",
    [((2, 75), 2), ((75, 1), 1), ((76, 76), 76), ((130, 75), 130), ((134, 134), 134)],
)
def test_any_other_status_ends(
    cloud: dict[str, str], tmp_path: Path, ends: tuple[int, int], status: int
) -> None:
    world.plan(tmp_path, ends)
    result = train(cloud)
    assert result.returncode == status
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 2
    assert len(world.calls(tmp_path, "delete")) == 1, "it costs no more"
    assert "worker-1: training on 1" in result.stdout, "the end of the other's log"


def test_a_worker_that_hangs_is_killed(cloud: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (75, "hangs"), (0, 0))
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert "txl_jax-status stuck" in result.stdout


def test_restarts_are_bounded(cloud: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (75, 75), (75, 75), (75, 75))
    assert train(cloud, "--max_restarts=1").returncode == 75
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 4
    assert len(world.calls(tmp_path, "delete")) == 1


def test_every_machine_mounts_the_share_once(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (75, 75), (0, 0))
    result = train(cloud, "--keep")
    assert result.returncode == 0, result.stderr
    assert "restart 1" in result.stderr
    mount = ["-t", "nfs", "-o", "nolock,retry=0", "10.0.0.2:/share", "share"]
    mounted = sorted(world.calls(tmp_path, "mounted"))
    assert mounted == [["mounted", place, *mount] for place in ("0", "1")]


@pytest.mark.skipif(not os.geteuid(), reason="root may write anywhere")
def test_a_fresh_share_is_made_writable(cloud: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (0, 0))
    assert train(cloud, "--keep").returncode == 0
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("share")}
    assert modes == {0o777}


def test_what_is_missing_to_mount_is_installed(tmp_path: Path) -> None:
    cloud = world.make(tmp_path, "gcloud", *world.MACHINE)
    world.plan(tmp_path, (0, 0))
    assert train(cloud).returncode == 0
    assert len(world.calls(tmp_path, "apt-get", "install", "nfs-common")) == 2


def test_nothing_is_installed_that_is_there(tmp_path: Path) -> None:
    cloud = world.make(tmp_path, "gcloud", *world.MACHINE, "mount.nfs")
    world.plan(tmp_path, (0, 0))
    assert train(cloud).returncode == 0
    assert not world.calls(tmp_path, "apt-get")


SPOILED = {
    "10.0.0.2:/gone cannot be mounted at share: mount.nfs: No such file or directory": (
        {"FLAG": "--nfs=10.0.0.2:/gone"}
    ),
    "nfs-common cannot be installed: E: Unable to locate package nfs-common": (
        {"NO_PACKAGES": "1"}
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_share_that_cannot_be_mounted_ends_before_training(
    cloud: dict[str, str], tmp_path: Path, message: str
) -> None:
    spoiled = dict(SPOILED[message])
    result = train({**cloud, **spoiled}, *filter(None, [spoiled.get("FLAG")]))
    assert result.returncode == 1
    said = result.stderr.splitlines()
    for place in ("0", "1"):
        assert said.count(f"tpu_worker.sh: worker-{place}: {message}") == 5, "attempts"
    assert "a warning" not in result.stderr
    assert not world.calls(tmp_path, "training", "txl_jax.main")
    assert len(world.calls(tmp_path, "delete")) == 1, "it costs no more"


def test_another_share_in_its_place_is_not_taken(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    assert train(cloud, "--keep").returncode == 0
    result = train(cloud, "--keep", "--nfs=10.0.0.3:/share")
    assert result.returncode == 1
    assert "at share: 10.0.0.2:/share is there already" in result.stderr


def test_without_a_share_nothing_is_mounted(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    local = ["--config=wt103", "--workdir=runs/wt103"]
    result = world.run(cloud, "tpu_vm.sh", *FLAGS[:3], "--keep", "--", *local)
    assert result.returncode == 0, result.stderr
    assert not world.calls(tmp_path, "mounted")
    assert not world.calls(tmp_path, "apt-get")


def test_one_machine_needs_no_share_for_a_bucket(tmp_path: Path) -> None:
    bucket = ["--config=wt103", "--workdir=gs://b/wt103"]
    flags = *FLAGS[:2], "--accelerator_type=v5litepod-8", "--spot", "--dry_run"
    result = world.run(world.make(tmp_path), "tpu_vm.sh", *flags, "--", *bucket)
    assert result.returncode == 0, result.stderr
    assert "--workdir=gs://b/wt103" in result.stdout
    assert "mount" not in result.stdout


@pytest.mark.parametrize("failures, status", [(1, 0), (3, 1)])
def test_creation_fails(
    cloud: dict[str, str], tmp_path: Path, failures: int, status: int
) -> None:
    world.plan(tmp_path, (0, 0))
    (tmp_path / "trouble").write_text("create 1\n" * failures)
    result = train(cloud)
    assert result.returncode == status
    assert len(world.calls(tmp_path, "create")) == failures + 1 - status
    if status:
        assert "my-run cannot be created" in result.stderr.splitlines()[-1]
        assert not world.calls(tmp_path, "ssh")


def test_a_request_that_failed_ends(cloud: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "resource").write_text("ACCEPTED\nFAILED\n")
    result = train(cloud)
    assert result.returncode == 1
    assert "--delete it" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("where", ["scp", "follow", "finish"])
def test_ssh_fails_once(cloud: dict[str, str], tmp_path: Path, where: str) -> None:
    world.plan(tmp_path, (0, 0))
    (tmp_path / "trouble").write_text(f"{where} 255\n")
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert len(world.calls(tmp_path, "create")) == 1
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 2, "started once"


def test_a_connection_lost_after_the_start_does_not_start_twice(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, ("followed 1", "followed 1"), (1, 1))
    (tmp_path / "trouble").write_text("start 255 late\n")
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 2


def test_ssh_never_gets_through(cloud: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "trouble").write_text("status 255\n" + "scp 255\n" * 5)
    result = train(cloud)
    assert result.returncode == 1
    assert "attempt 5 of 5 failed: set_up" in result.stderr
    assert len(world.calls(tmp_path, "delete")) == 1


def test_what_cannot_be_deleted_is_shouted_about(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, (0, 0))
    (tmp_path / "trouble").write_text("delete 1\n" * 5)
    result = train(cloud)
    assert result.returncode == 1
    assert "COULD NOT BE DELETED" in result.stderr.splitlines()[-1]


def test_keep_leaves_the_slice(cloud: dict[str, str], tmp_path: Path) -> None:
    world.plan(tmp_path, (0, 0))
    result = train(cloud, "--keep", training=["--config=wt103", "--workdir=runs/wt103"])
    assert result.returncode == 0, result.stderr
    assert not world.calls(tmp_path, "delete")
    assert "--delete ends its costs" in result.stderr
    result = world.run(cloud, "tpu_vm.sh", *FLAGS[:2], "--delete")
    assert result.returncode == 0
    assert world.calls(tmp_path, "delete")[0][4:7] == ["delete", "my-run", "--force"]


def test_interrupted_the_slice_trains_on_and_is_followed_again(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    world.plan(tmp_path, ("followed 2", "followed 2"), (1, 1))
    script = str(world.ROOT / "launch/tpu_vm.sh")
    # What a shell runs in the background ignores SIGINT, and so would its children.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    heed += "os.execvp('bash', sys.argv[1:])"
    command = [sys.executable, "-c", heed, "bash", script, *FLAGS, "--", *TRAIN]
    with subprocess.Popen(
        command,
        env=cloud,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not world.calls(tmp_path, "follow"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command follows it again" in said
    result = train(cloud)
    assert result.returncode == 0, result.stderr
    assert "trains already" in result.stderr
    assert len(world.calls(tmp_path, "training", "txl_jax.main")) == 2
    assert len(world.calls(tmp_path, "create")) == 1


def test_dry_run_prints_the_commands_and_runs_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = world.make(tmp_path)  # without gcloud
    result = train(environment, "--dry_run", training=[*TRAIN, "--config.x=a b"])
    assert result.returncode == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    assert shlex.split(first)[1:6] == [
        *("exec", ".venv/bin/python", "-m", "txl_jax.main"),
        TRAIN[0],
    ]
    assert shlex.split(first)[-1] == "--config.x=a b"
    commands = [shlex.split(line) for line in rest]
    assert {command[1] for command in commands} == {"gcloud"}
    verbs = [command[5] for command in commands]
    assert verbs == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert "tpu_worker.sh mount 10.0.0.2:/share && " in commands[2][-1]
    assert not world.calls(tmp_path)


NAME, ZONE, TYPE, NFS = FLAGS
MISTAKES = {
    "--name is missing": [ZONE, TYPE, "--", *TRAIN],
    "--zone is missing": [NAME, TYPE, "--", *TRAIN],
    "--accelerator_type is missing": [NAME, ZONE, "--", *TRAIN],
    "--name=My Run is none": ["--name=My Run", ZONE, TYPE, "--", *TRAIN],
    "--zone=us-west4 is none": [NAME, "--zone=us-west4", TYPE, "--", *TRAIN],
    "=v5e is none": [NAME, ZONE, "--accelerator_type=v5e", "--", *TRAIN],
    "give --runtime_version": [NAME, ZONE, "--accelerator_type=v9x-8", "--", *TRAIN],
    "--max_restarts=x is none": [*FLAGS, "--max_restarts=x", "--", *TRAIN],
    "unknown flag '--spto'": [*FLAGS, "--spto", "--", *TRAIN],
    "unknown flag '--config=wt103'": [*FLAGS, "--config=wt103"],
    "flags are missing": [*FLAGS],
    "there is no --workdir": [*FLAGS, "--", "--config=wt103"],
    "--nfs=/share is none": [*FLAGS, "--nfs=/share", "--", *TRAIN],
    "--nfs=a:/b;c is none": [*FLAGS, "--nfs=a:/b;c", "--", *TRAIN],
    "is on no share: give --nfs": [NAME, ZONE, TYPE, "--keep", "--", *TRAIN],
    "=gs://b/w is for one machine": [*FLAGS, "--", "--workdir=gs://b/w"],
    "=gs://b/x is for one": [*FLAGS, "--keep", "--", "--workdir", "gs://b/x"],
    "is lost with a spot": [*FLAGS, "--spot", "--keep", "--", "--workdir=runs/x"],
    "is deleted with the machine": [*FLAGS, "--", "--workdir", "runs/x"],
    "=/mnt/txl/ is deleted": [*FLAGS, "--", "--workdir=/mnt/txl/"],
    "is no experiment": [*FLAGS, "--", "--config=wt104", "--workdir=/mnt/txl/w"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_costs_nothing(
    cloud: dict[str, str], tmp_path: Path, message: str
) -> None:
    result = world.run(cloud, "tpu_vm.sh", *MISTAKES[message])
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert not result.stdout
    assert not world.calls(tmp_path)


def test_without_gcloud(tmp_path: Path) -> None:
    environment = world.make(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "mktemp", "rm", "dirname"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    result = train({**environment, "PATH": str(tools)})
    assert result.returncode == 2
    assert "gcloud is not on PATH" in result.stderr


def test_help(tmp_path: Path) -> None:
    result = world.run(world.make(tmp_path), "tpu_vm.sh", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: launch/tpu_vm.sh")
