"""Processes connect, and exit after a timeout or a signal."""

import contextlib
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import LIMIT_SECONDS, Processes
from txl_jax.errors import UserError
from txl_jax.runtime import distributed

# The environment of a process, and a part of the error; none for a single process.
ENVIRONMENTS = [
    ({"JAX_NUM_PROCESSES": "4"}, "(ValueError: invalid literal for int"),
    ({"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}, "(ValueError: coordinator"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "(ValueError: Number of processes must"),
    ({"JAX_COORDINATOR_ADDRESS": "a:x"}, "'a:x' must be host:port"),
    ({"JAX_COORDINATOR_ADDRESS": "a:65536"}, "'a:65536' must be host:port"),
    ({"JAX_NUM_PROCESSES": "1"}, ""),
    ({}, ""),
]
CONNECTS_EACH = """
import os, sys
from txl_jax.errors import UserError
from txl_jax.runtime import distributed
for environment in eval(sys.argv[1]):
    os.environ |= environment
    try:
        distributed.connect()
        assert not distributed.several()
        print("alone")
    except UserError as error:
        print(error)
    for name in environment:
        del os.environ[name]
"""


def test_partial_environments_are_refused() -> None:
    given = repr([environment for environment, _ in ENVIRONMENTS])
    command = [sys.executable, "-c", CONNECTS_EACH, given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(ENVIRONMENTS), done.stdout
    for line, (_, part) in zip(lines, ENVIRONMENTS, strict=True):
        assert part in line and (part or line == "alone")


# A job of one task, as srun describes it to jax.
SLURM = dict(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="1")
SLURM |= dict(SLURM_PROCID="0", SLURM_LOCALID="0", JAX_PLATFORMS="cpu")
CONNECTS = """
import jax
from txl_jax.runtime import distributed
distributed.connect()
assert jax.distributed.is_initialized() and not distributed.several()
"""


def test_jax_finds_the_tasks_of_slurm(tmp_path: Path) -> None:
    run = Processes(tmp_path, python=("-c", CONNECTS), count=1, environments=[SLURM])
    assert run.wait() == [0], run.stderr[0].read_text()


CONNECT = "from txl_jax.runtime import distributed; distributed.connect(2)"


def test_processes_give_up_if_one_of_them_is_missing(tmp_path: Path) -> None:
    """Two of three exit, each with one line and the status RETRY."""
    three = {"JAX_NUM_PROCESSES": "3"}
    run = Processes(tmp_path, python=("-c", CONNECT), environments=[three, three])
    assert run.wait() == [75, 75]
    for stderr in run.stderr:
        (line,) = stderr.read_text().splitlines()
        assert line.startswith("txl_jax: not all processes connected within 2 s")


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
    """jax aborts the other one, even outside a collective."""
    run = Processes(tmp_path, python=("-c", WAITS))
    run.until(lambda: all("ready" in path.read_text() for path in run.stderr))
    run.all[killed].kill()
    statuses = run.wait()
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] == -signal.SIGABRT


# As on TPUs, where a host's chips need not be neighbours in the mesh.
INTERLEAVED = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import AXES
from txl_jax.sharding.rules import host_rows, place_segments

distributed.connect()
first, second, third, fourth = jax.devices()
order = np.array([first, third, fourth, second]).reshape(4, 1, 1)
mesh = Mesh(order, AXES, axis_types=(AxisType.Auto,) * 3)
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
    print("ready", flush=True)
    if sys.argv[1] == "busy":
        threading.Event().wait()
    while not stop.at_boundary():
        time.sleep(0.01)
sys.exit(stop.end("here").status)
"""


@pytest.mark.parametrize(
    ("busy", "signals", "status"),
    [
        ("free", [signal.SIGTERM], 75),
        ("free", [signal.SIGINT], 130),
        ("busy", [signal.SIGINT, signal.SIGINT], -signal.SIGINT),
    ],
    ids=str,
)
def test_signals_end_a_process(
    busy: str, signals: list[signal.Signals], status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, busy],
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
    assert exit_of(RuntimeError("INTERNAL: a bug")) == (
        "RuntimeError: INTERNAL: a bug",
        1,
    )
    assert exit_of(BrokenPipeError(errno.EPIPE, "Broken pipe")) == ("", 141)
    assert exit_of(None) is None and exit_of(UserError("raised by all")) is None
