"""Detects the death of another process at once, even while this process waits.

Every process holds a TCP connection to process 0, which the system closes when the
process dies. JAX's coordination service detects a death by missing heartbeats, 30 s
later, and aborts the process with status 134 and a C++ stack, even while a thread waits
at a barrier of the service (seen with jax 0.10); its public interface has no callback.
A failing collective raises an error at once, but a process need not be in one. Where no
connection can be made, that abort remains.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from jax._src.distributed import global_state  # orbax uses it, too

from txl_jax.errors import BROKEN_PIPE, RETRY, USER_ERROR
from txl_jax.runtime import distributed

KEY = "txl_jax/peers"
MEET_SECONDS = 30
GRACE_SECONDS = 2  # for a process to report its own error, which explains more
EXIT_SECONDS = 30  # of process 0, for the others to end before it


class Peers:
    """The connections of this process: to process 0, or from there to all others."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.status = b""  # with which this process exits
        self.over = threading.Event()

    def listen(self) -> None:
        """Accepts connections of processes that send the password."""
        server = socket.create_server(("", 0), family=socket.AF_INET)
        password = secrets.token_hex(16)
        port = server.getsockname()[1]
        client: Any = global_state.client
        client.key_value_set(KEY, f"{port} {password}")
        _start(self._accept, server, password.encode())

    def _accept(self, server: socket.socket, password: bytes) -> None:
        while True:
            end, _ = server.accept()
            end.settimeout(MEET_SECONDS)
            with contextlib.suppress(OSError):
                if end.recv(len(password), socket.MSG_WAITALL) == password:
                    self._keep(end)
                    continue
            end.close()

    def join(self) -> None:
        """Connects to process 0."""
        client: Any = global_state.client
        value = client.blocking_key_value_get(KEY, 1000 * distributed.CONNECT_SECONDS)
        port, password = value.split()
        host = str(global_state.coordinator_address).rpartition(":")[0]
        end = socket.create_connection((host.strip("[]"), int(port)), MEET_SECONDS)
        end.sendall(password.encode())
        self._keep(end)

    def _keep(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.ends.append(end)
        if self.status:
            self._send(end)
        _start(self._watch, end)

    def _watch(self, end: socket.socket) -> None:
        status = b""
        try:
            status = end.recv(1)
        except ConnectionResetError:
            pass
        except OSError:  # the network is silent: left to jax's heartbeat
            return
        if status or global_state.process_id == 0:
            time.sleep(GRACE_SECONDS)
        if self.over.is_set():
            return
        if status == bytes([USER_ERROR]):
            distributed.exit_now("another process has an error", USER_ERROR)
        if status == bytes([BROKEN_PIPE]):
            distributed.exit_now("", BROKEN_PIPE)
        line = "another process is lost (its connection closed); the same command"
        distributed.exit_now(f"{line} resumes", RETRY)

    def tell(self, status: int) -> None:
        """Sends the exit status of this process; its exit then closes the connections.

        Process 0 sends it to all others, also to those that connect later, and waits
        for their exits: its own would abort them.
        """
        self.status = bytes([status])
        for end in self.ends:
            self._send(end)
        if global_state.process_id:
            return
        limit = time.monotonic() + EXIT_SECONDS
        for n in range(int(global_state.num_processes or 1) - 1):
            while n >= len(self.ends) and time.monotonic() < limit:
                time.sleep(0.1)
            for end in self.ends[n : n + 1]:
                with contextlib.suppress(OSError):
                    end.settimeout(max(limit - time.monotonic(), 0.1))
                    while end.recv(1):  # b"" once the process has exited
                        pass

    def _send(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.sendall(self.status)


def _start(target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, name="peers", daemon=True).start()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Ends this process with status RETRY if another process of the run dies inside."""
    if not distributed.several():
        yield
        return
    peers = Peers()
    distributed.before_exit.append(peers.tell)
    with contextlib.suppress(OSError):
        peers.join() if global_state.process_id else peers.listen()
    try:
        yield
    finally:  # the connections close with the process, after all have come this far
        peers.over.set()
