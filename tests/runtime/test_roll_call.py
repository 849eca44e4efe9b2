"""Each process of a run must report once, and all with the same count."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.processes import LIMIT_SECONDS, free_port
from txl_jax.errors import UserError
from txl_jax.runtime import roll_call

TWICE = "JAX_PROCESS_ID = 1 in two processes: number all 3"
COUNTS = "JAX_NUM_PROCESSES = 3 in process 1, 2 in process 0"


def attend(
    port: int, *processes: tuple[int, int], seconds: float = LIMIT_SECONDS
) -> list[str]:
    """Returns the error of each process (id, count), "" for none.

    A process with a negative count refuses the command.
    """
    errors = [""] * len(processes)

    def come(place: int, index: int, count: int) -> None:
        try:
            address = f"127.0.0.1:{port}"
            roll_call.attend(address, abs(count), index, seconds, refuses=count < 0)
        except UserError as error:
            errors[place] = str(error)

    threads = [
        threading.Thread(target=come, args=(place, *each))
        for place, each in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(
    "processes, expected",
    [
        ([(0, 3), (2, 3), (1, 3)], ["", "", ""]),
        ([(0, 3), (1, 3), (1, 3)], [TWICE] * 3),
        ([(0, 2), (1, 3)], [COUNTS] * 2),
        ([(0, 3), (2, -3), (1, 3)], [roll_call.REFUSED] * 3),
        ([(0, -2), (1, 2)], [roll_call.REFUSED] * 2),
    ],
)
def test_ids_and_counts_must_fit(
    processes: list[tuple[int, int]], expected: list[str]
) -> None:
    errors = attend(free_port(), *processes)
    for error, start in zip(errors, expected, strict=True):
        assert error.startswith(start) and bool(error) == bool(start)


def test_a_second_process_0_and_a_surplus_process_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(roll_call, "time", clock)
    with socket.create_server(("127.0.0.1", 0)) as jax:

        def close_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    jax.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        second, third = attend(jax.getsockname()[1], (0, 2), (1, 2))
    assert "is another process number 0?" in second
    assert third.startswith("JAX_PROCESS_ID = 1, but all processes of the run")


def test_strangers_and_the_first_start_of_a_restarted_process_do_not_count() -> None:
    port, answers = free_port(), []

    def send(message: bytes) -> socket.socket:
        while True:
            try:
                link = socket.create_connection(("127.0.0.1", port))
            except OSError:  # process 0 does not listen yet
                time.sleep(0.01)
            else:
                link.sendall(message)
                return link

    def disturb() -> None:
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"1 3\n", b"\xff\n", b""):
            send(message).close()
        with send(b"2 3\n") as link:  # while process 1 starts again
            answers.extend(attend(port, (1, 3)))
            answers.append(link.makefile().readline().strip())

    thread = threading.Thread(target=disturb)
    thread.start()
    assert attend(port, (0, 3)) == [""]
    thread.join()
    assert answers == ["", roll_call.YES]


def test_missing_processes_are_left_to_the_timeout() -> None:
    assert attend(free_port(), (0, 2), seconds=0.3) == [""]
