"""A process detects the death of another by the connection between them."""

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from txl_jax.runtime import distributed, peers
from txl_jax.runtime.peers import Peers


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Stands for the ends of processes; two share this one, and the first watches."""
    result: list[tuple[str, int]] = []
    values: dict[str, str] = {}
    client = SimpleNamespace(
        key_value_set=values.__setitem__,
        blocking_key_value_get=lambda key, timeout_ms: values[key],
    )
    state = SimpleNamespace(client=client, coordinator_address="127.0.0.1:1")
    monkeypatch.setattr(peers, "global_state", state)
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0)
    monkeypatch.setattr(distributed, "is_first", lambda: True)
    monkeypatch.setattr(distributed, "exit_now", lambda *output: result.append(output))
    return result


def connect() -> tuple[Peers, Peers]:
    """Returns process 0's connections and another's, once they are made."""
    first, second = Peers(), Peers()
    first.listen()
    second.join()
    until(lambda: first.ends)
    return first, second


def until(happened: object) -> None:
    for _ in range(500):
        if happened():  # type: ignore[operator]
            return
        threading.Event().wait(0.01)
    raise AssertionError("did not happen within 5 s")


def test_a_closed_connection_ends_the_process(left: list[tuple[str, int]]) -> None:
    _, second = connect()
    second.over.set()  # it prints nothing itself
    second.ends[0].shutdown(socket.SHUT_RDWR)
    until(lambda: left)
    line, status = left[0]
    assert status == 75 and line.startswith("another process is lost (its connection")


def test_after_the_end_nothing_is_noticed(left: list[tuple[str, int]]) -> None:
    first, second = connect()
    first.over.set()
    second.over.set()
    second.ends[0].shutdown(socket.SHUT_RDWR)
    threading.Event().wait(0.2)
    assert left == []


def test_strangers_are_not_kept(left: list[tuple[str, int]]) -> None:
    first = Peers()
    first.listen()
    client: Any = peers.global_state.client
    port = int(client.blocking_key_value_get(peers.KEY, 0).split()[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"?" * 32)
    threading.Event().wait(0.2)
    assert left == [] and first.ends == []
