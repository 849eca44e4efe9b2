"""Connection of processes, and their exits: by timeout or signal."""

import contextlib
import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LIMIT_SECONDS, Processes
from tests.support.refusal import refused
from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.runtime.environment import SLURM as SLURM_NAMES
from txl_jax.runtime.environment import find_processes

JOB = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "4"}
ENVIRONMENT = JOB | {"JAX_PROCESS_ID": "3"}
ARGS: dict[str, Any] = dict(coordinator_address="node0:1234", num_processes=4)
ARGS |= dict(process_id=3, cluster_detection_method="deactivate")
TPU = {"TPU_ML_PLATFORM": "Google"}
SLURM = {"cluster_detection_method": "slurm"}
TASK = dict.fromkeys(SLURM_NAMES, "7") | {"SLURM_STEP_NUM_TASKS": "8"}
DETECTED = {"cluster_detection_method": None}


@pytest.mark.parametrize(
    ("environment", "args"),
    [
        ({}, {}),
        (ENVIRONMENT, ARGS),
        # Of an indexed job of Kubernetes, GKE's JobSet among them.
        (JOB | {"JOB_COMPLETION_INDEX": "3"}, ARGS),
        ({"JAX_NUM_PROCESSES": "1"}, {}),
        (TASK, SLURM),
        # A batch script's or a shell's own process, which srun did not start.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}, {}),
        # A TPU VM has the hosts in its metadata, GKE in the environment.
        (TPU, DETECTED),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b"}, DETECTED),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, {}),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, DETECTED),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        (TPU | ENVIRONMENT, ARGS),
    ],
    ids=str,
)
def test_processes_are_found(environment: dict[str, str], args: dict[str, Any]) -> None:
    assert find_processes(environment) == args


BAD = [
    (TASK, "SLURM_JOB_ID=", "TASKS is set without SLURM_JOB_ID: start with"),
    (TASK, "SLURM_PROCID=x", "SLURM_PROCID = 'x' must be a whole number"),
    (TASK, "SLURM_STEP_NUM_TASKS=", "TASKS = '' must be a whole number"),
    ({}, "MEGASCALE_NUM_SLICES=", "SLICES = '' must be a whole number"),
    (ENVIRONMENT, "JAX_PROCESS_ID=", "JAX_NUM_PROCESSES is set without JAX_PROCESS_ID"),
    (ENVIRONMENT, "JAX_PROCESS_ID=4", "JAX_PROCESS_ID = 4 must be below"),
    (ENVIRONMENT, "JAX_PROCESS_ID=x", "JAX_PROCESS_ID = 'x' must be a whole number"),
    (ENVIRONMENT, "JAX_COORDINATOR_ADDRESS=a:x", "'a:x' must be host:port"),
    (ENVIRONMENT, "JAX_COORDINATOR_ADDRESS=a:65536", "'a:65536' must be host:port"),
    (ENVIRONMENT, "JAX_COORDINATOR_ADDRESS=", "without JAX_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize("given, change, message", BAD, ids=str)
def test_bad_environments_are_refused(
    given: dict[str, str], change: str, message: str
) -> None:
    name, _, value = change.partition("=")
    with refused(message):
        find_processes(given | {name: value})


CONNECT = "from txl_jax.runtime import distributed; distributed.connect(2)"


def test_processes_give_up_if_one_of_them_is_missing(tmp_path: Path) -> None:
    """Two of three exit, each with one line and the status RETRY."""
    three = {"JAX_NUM_PROCESSES": "3"}
    run = Processes(tmp_path, python=("-c", CONNECT), environments=[three, three])
    assert run.wait() == [75, 75]
    for index, stderr in enumerate(run.stderr):
        (line,) = stderr.read_text().splitlines()
        start = f"txl_jax[{index}]: not all processes connected to 127.0.0.1:"
        assert line.startswith(start) and "within 2 s" in line


WAITS = """
import sys, threading
from txl_jax.runtime import distributed

distributed.connect()
distributed.wait_for_all()
print("ready", file=sys.stderr, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_death_of_a_process_ends_the_other(tmp_path: Path, killed: int) -> None:
    """The other one need not be in a collective; jax aborts it."""
    run = Processes(tmp_path, python=("-c", WAITS))
    run.until(lambda: all("ready" in path.read_text() for path in run.stderr))
    run.all[killed].kill()
    statuses = run.wait()
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] == -signal.SIGABRT


def test_the_heartbeat_leaves_a_margin_to_60_seconds() -> None:
    """Jax ends them at the next missed heartbeat; half of the time is a margin."""
    assert distributed.HEARTBEAT_SECONDS <= 30


# As on TPUs, where a host's chips need not be neighbours in the mesh.
INTERLEAVED = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import AXES
from txl_jax.sharding.rules import host_rows, place_segments

distributed.connect()
first, second, third, fourth = jax.devices()
order = np.array([first, third, fourth, second]).reshape(4, 1, 1, 1)
mesh = Mesh(order, AXES, axis_types=(AxisType.Auto,) * 4)
x_SBL = np.arange(2 * 8 * 3).reshape(2, 8, 3)
rows = host_rows(mesh, 8, "train.batch_size")
placed = place_segments(mesh, x_SBL[:, rows])
assert placed.shape == x_SBL.shape, placed.shape
for shard in placed.addressable_shards:
    np.testing.assert_array_equal(shard.data, x_SBL[shard.index])
print(rows.tolist())
distributed.wait_for_all()
"""


def test_processes_feed_interleaved_devices(tmp_path: Path) -> None:
    run = Processes(tmp_path, python=("-c", INTERLEAVED))
    assert run.wait() == [0, 0], run.said(0)
    for text, rows in zip(run.stdout, ("[0, 1, 6, 7]", "[2, 3, 4, 5]"), strict=True):
        assert rows in text.splitlines(), text


LISTENS = """
import sys, threading, time
from txl_jax.runtime import preemption

with preemption.listening() as stop:
    if sys.argv[1] == "holds":
        stop.hold()
    print("ready", flush=True)
    if sys.argv[2] == "busy":
        threading.Event().wait()
    while not stop.at_boundary():
        time.sleep(0.01)
sys.exit(stop.end("here").status)
"""


@pytest.mark.parametrize(
    ("holds", "busy", "signals", "status"),
    [
        ("holds", "free", [signal.SIGTERM], 75),
        ("holds", "free", [signal.SIGINT], 130),
        # Nothing would be lost, so it need not reach a boundary.
        ("idle", "busy", [signal.SIGINT], 130),
        ("holds", "busy", [signal.SIGINT, signal.SIGINT], 130),
    ],
    ids=str,
)
def test_signals_end_a_process(
    holds: str, busy: str, signals: list[signal.Signals], status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, holds, busy],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr and process.stdout.readline() == "ready\n"
    process.send_signal(signals[0])
    for number in signals[1:]:
        assert "a second one ends at once" in process.stderr.readline()
        # A signal that arrives while the first is being handled may be lost.
        while process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == status, stderr
    at_once = "ended at once; the same command resumes" in stderr
    assert at_once == (busy == "busy")


def test_lost_processes_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[tuple[str, int]] = []

    def exit_of(error: Exception | None) -> tuple[str, int] | None:
        exits.clear()
        distributed.exit_on_error(type(error), error, None)
        return exits[0] if exits else None

    monkeypatch.setattr(distributed, "several", lambda: True)
    monkeypatch.setattr(distributed, "warn", lambda line: None)
    monkeypatch.setattr(distributed, "exit_now", lambda *end: exits.append(end))
    lost = exit_of(ValueError("UNKNOWN: Gloo all-reduce failed: Read error: by peer"))
    assert lost is not None and lost[1] == 75
    assert lost[0].startswith("another process is lost (UNKNOWN: Gloo")
    memory = exit_of(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    line = "out of memory (RESOURCE_EXHAUSTED: out of memory): lower train.batch_size"
    assert memory is not None and memory[0].startswith(line) and memory[1] == 2
    assert exit_of(BrokenPipeError(errno.EPIPE, "Broken pipe")) == ("", 141)
    assert exit_of(None) is None and exit_of(UserError("raised by all")) is None
