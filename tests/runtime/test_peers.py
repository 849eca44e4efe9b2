"""A process detects the death of another by the connection between them."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.processes import Processes
from txl_jax.runtime import distributed, peers

WAITS = """
import sys, threading
from contextlib import ExitStack
from txl_jax.runtime import distributed, peers

distributed.connect()
with ExitStack() as stack:
    stack.push(distributed.exit_on_error)
    stack.enter_context(peers.watching())
    distributed.wait_for_all()
    print("ready", file=sys.stderr, flush=True)
    threading.Event().wait()
"""


def test_the_death_of_a_process_ends_the_other(tmp_path: Path) -> None:
    """The other one need not be in a collective."""
    run = Processes(tmp_path, python=("-c", WAITS))
    run.until(lambda: all("ready" in path.read_text() for path in run.stderr))
    run.all[1].kill()
    assert run.wait() == [75, -9]
    (line,) = run.said(0)
    assert line == (
        "txl_jax[0]: another process is lost (its connection closed); the same command "
        "resumes"
    )


# Process 1 connects when process 0 has begun to exit.
EXITS = """
import os, sys, threading, time
from pathlib import Path
from txl_jax.runtime import distributed, peers

distributed.connect()
while os.environ["JAX_PROCESS_ID"] == "1" and not Path(sys.argv[1]).read_text():
    time.sleep(0.01)
with peers.watching():
    if os.environ["JAX_PROCESS_ID"] == "0":
        distributed.exit_now("an error", 2)
    threading.Event().wait()
"""


def test_process_0_exits_after_the_others(tmp_path: Path) -> None:
    """Its exit would abort them, whatever their own status."""
    stderr = str(tmp_path / "stderr.0")
    run = Processes(tmp_path, stderr, python=("-c", EXITS))
    assert run.wait() == [2, 2]
    assert run.said(0) == ["txl_jax[0]: an error"]
    assert run.said(1) == ["txl_jax[1]: another process has an error"]


def test_connections_without_the_password_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[tuple[str, int]] = []
    values: dict[str, str] = {}
    client = SimpleNamespace(key_value_set=values.__setitem__)
    monkeypatch.setattr(peers, "global_state", SimpleNamespace(client=client))
    monkeypatch.setattr(distributed, "exit_now", lambda *output: ends.append(output))
    first = peers.Peers()
    first.listen()
    port = int(values[peers.KEY].split()[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"?" * 32)
        assert stranger.recv(1) == b""
    assert ends == [] and first.ends == []
