"""The roll call: each process must report exactly once before JAX connects them.

JAX aborts a process, or even process 0 and so the whole run, with a C++ stack if two
processes have one id, and it does not notice counts that differ. So process 0 first
listens on the coordinator's port itself. The others tell it their id and their count,
and wait for its answer.
"""

import contextlib
import os
import socket
import time
from contextlib import ExitStack

from txl_jax.errors import UserError

YES = "all are here"
REFUSED = "another process has an error"
SECONDS = 5.0  # to use the port of a process that is ending, or to send a few bytes
# Of other answers than the roll call's: the run that has just lost a process gives them
# until it notices (HEARTBEAT_SECONDS of `distributed`) and ends (EXIT_SECONDS of
# `peers`).
LATE_SECONDS = 90.0
LENGTH = 63  # of a message; JAX would wait for more than a few bytes
PAUSE_SECONDS = 0.2  # between attempts, and until JAX listens


def attend(
    address: str, count: int, index: int, wait_seconds: float, refuses: bool = False
) -> None:
    """Returns when all processes have reported, or after wait_seconds.

    refuses: this process has an error and will not run. Raises UserError in all
    processes that have reported if one of them refuses, or two have the same id or
    different counts, and in a surplus process.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + wait_seconds
    if index == 0:
        _call(address, int(port), count, end, refuses)
        return
    message = f"{index} {count} {'refuses' * refuses}".ljust(LENGTH).encode() + b"\n"
    began = 0.0  # since when JAX has listened there instead of process 0's roll call
    while time.monotonic() < end:
        answer, listens = "", False
        with contextlib.suppress(OSError, UnicodeError):  # process 0 is not there yet
            place = host.strip("[]"), int(port)
            with socket.create_connection(place, SECONDS) as link:
                listens = True
                link.sendall(message)
                link.settimeout(max(end - time.monotonic(), 0.1))
                answer = link.makefile(encoding="utf-8").readline().strip()
        if answer == REFUSED or answer.startswith("JAX_"):
            raise UserError(answer)
        time.sleep(PAUSE_SECONDS)
        if answer == YES:
            return
        began = (began or time.monotonic()) if listens else 0.0
        if began and time.monotonic() - began > LATE_SECONDS:
            raise UserError(
                f"JAX_PROCESS_ID = {index}, but all processes of the run at "
                f"JAX_COORDINATOR_ADDRESS = {address} are there: number them from 0, "
                "each once, with the same JAX_NUM_PROCESSES"
            )


def _call(address: str, port: int, count: int, end: float, refuses: bool) -> None:
    """Waits for the other processes, and answers all of them."""
    with ExitStack() as stack:
        server = stack.enter_context(_listen(address, port))
        came: dict[int, socket.socket] = {}
        error = ""
        while len(came) < count - 1 and not error and time.monotonic() < end:
            server.settimeout(max(end - time.monotonic(), 0.1))
            # Nobody, or another program.
            with contextlib.suppress(OSError, ValueError):
                link = stack.enter_context(server.accept()[0])
                link.settimeout(SECONDS)
                words = link.makefile(encoding="utf-8").readline(LENGTH + 1).split()
                index, its_count = map(int, words[:2])
                refuses = refuses or words[2:] == ["refuses"]
                error = _error(index, its_count, count, came)
                came[index if not error else -1] = link
                # Without those that have died meanwhile, which may start again.
                came = {index: link for index, link in came.items() if _is_open(link)}
        error = error or REFUSED * refuses
        for link in came.values():
            with contextlib.suppress(OSError):
                link.sendall(f"{error or YES}\n".encode())
    if error:
        raise UserError(error)


def _error(
    index: int, its_count: int, count: int, came: dict[int, socket.socket]
) -> str:
    if its_count != count:
        return (
            f"JAX_NUM_PROCESSES = {its_count} in process {index}, {count} in process "
            "0: start all processes with the same number"
        )
    if index in came and _is_open(came[index]):
        return (
            f"JAX_PROCESS_ID = {index} in two processes: number all {count} processes "
            "from 0, each once"
        )
    return ""


def _is_open(link: socket.socket) -> bool:
    """Returns whether the process at the other end lives, and was not started again."""
    link.setblocking(False)
    try:
        return link.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _listen(address: str, port: int) -> socket.socket:
    """Returns a server; raises UserError if its port is in use for long."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as error:
            if time.monotonic() > end:
                reason = os.strerror(error.errno or 0)
                raise UserError(
                    f"JAX_PROCESS_ID = 0, but the port of JAX_COORDINATOR_ADDRESS = "
                    f"{address} cannot be used ({reason}): is another process "
                    "number 0? Number them from 0, each once, or give another port"
                ) from error
            time.sleep(PAUSE_SECONDS)
