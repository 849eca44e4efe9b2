"""A process detects the death of another by the connection between them."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.processes import Processes
from txl_jax.runtime import distributed, peers

WAITS = """
import sys, time
from contextlib import ExitStack
from txl_jax.runtime import distributed, peers

distributed.connect(60)
with ExitStack() as stack:
    stack.push(distributed.exit_on_error)
    stack.enter_context(peers.watching())
    distributed.wait_for_all()
    print("ready", file=sys.stderr, flush=True)
    time.sleep(100)
"""


def test_the_death_of_a_process_ends_the_other(tmp_path: Path) -> None:
    """At once, and even while it waits."""
    run = Processes(tmp_path, python=("-c", WAITS))
    run.until(lambda: all("ready" in path.read_text() for path in run.stderr))
    run.all[1].kill()
    assert run.wait() == [75, -9]
    (line,) = run.said(0)
    assert line == (
        "txl_jax[0]: another process is lost (its connection closed); the same command "
        "resumes"
    )


def test_strangers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
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
    threading.Event().wait(0.2)
    assert ends == [] and first.ends == []
