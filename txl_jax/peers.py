"""Noticing at once that another process of the run has died, wherever this one waits.

Every process holds a connection to process 0. When one dies its machine closes it. jax
would tell by its heartbeat, half a minute later, and by an abort. Where no connection
can be made, that is what remains.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from jax._src.distributed import global_state  # what orbax takes, too

from txl_jax import distributed
from txl_jax.errors import AGAIN

KEY = "txl_jax/peers"
MEET_SECONDS = 30
GRACE_SECONDS = 2  # that process 0 leaves to a reason of its own, which says more
LOST = b"!"


class Peers:
    """The connections of this process: of process 0 to all others, of others to it."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.over = threading.Event()

    def listen(self) -> None:
        """Lets the other processes connect, those that know the password."""
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
        found = client.blocking_key_value_get(KEY, 1000 * MEET_SECONDS)
        port, password = found.split()
        host = str(global_state.coordinator_address).rpartition(":")[0]
        end = socket.create_connection((host.strip("[]"), int(port)), MEET_SECONDS)
        end.sendall(password.encode())
        self._keep(end)

    def _keep(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.ends.append(end)
        _start(self._watch, end)

    def _watch(self, end: socket.socket) -> None:
        try:
            with end:
                told = end.recv(1)
        except ConnectionResetError:
            told = b""
        except OSError:  # the network's silence: jax judges it
            return
        first = distributed.is_first()
        if first:
            time.sleep(GRACE_SECONDS)
        if self.over.is_set():
            return
        for other in self.ends if first else ():
            with contextlib.suppress(OSError):
                other.send(LOST)
        reason = "process 0 says so" if told else "its connection closed"
        line = f"another process is lost ({reason}); the same command goes on"
        distributed.leave(line, AGAIN)


def _start(target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, name="peers", daemon=True).start()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Ends this process with status AGAIN when another of the run dies inside."""
    if not distributed.several():
        yield
        return
    peers = Peers()
    with contextlib.suppress(OSError):
        peers.listen() if distributed.is_first() else peers.join()
    try:
        yield
    finally:  # the connections close with the process, after all have come this far
        peers.over.set()
