"""Graceful termination: SIGTERM and SIGINT end a run without losing an update.

A preempted machine or Slurm sends SIGTERM, Ctrl-C sends SIGINT. The run ends at the
next boundary: after a call of the training step, or after a segment of an evaluation.
If no work would be lost, or at a second SIGINT, it ends at once.

Any process of a run may receive the signal. JAX's preemption service makes all of them
end at the same boundary: without a collective, it chooses in the background the next
one that no process has reached.
"""

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from jax.experimental import multihost_utils

from txl_jax.errors import INTERRUPTED, RETRY, Interrupted
from txl_jax.runtime import distributed

HEAD = b"(most recent call first)"  # faulthandler writes it once per signal


class Stop:
    """Whether a run has to end, and whether ending at once would lose work.

    `listening` makes the one of a program, and `current` returns it. `hold` and
    `release` bracket the time in which an immediate end would lose work. Loops call
    `at_boundary` after each unit of work, save, and raise `end(...)`.

    status: exit status, nonzero once this process has received a signal. reached:
    `at_boundary` has returned True. holds: an immediate end would lose work.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reached = False
        self._boundaries = 0
        self.release()

    def listen(self, number: signal.Signals, read: int) -> None:
        """Receives a signal each time that faulthandler writes to the pipe."""
        count = 0
        with open(read, "rb", buffering=0) as pipe:
            while written := pipe.read(65536):
                for _ in range(written.count(HEAD)):
                    count += 1
                    self._receive(number, count)

    def _receive(self, number: signal.Signals, count: int) -> None:
        status = INTERRUPTED if number == signal.SIGINT else RETRY
        if not self.holds or (number == signal.SIGINT and count > 1):
            line = f"{number.name}: ended at once; the same command resumes"
            distributed.exit_now(line, status)
        self.status = self.status or status
        if number == signal.SIGINT:
            distributed.warn(
                "SIGINT: ending after this call; a second one ends at once"
            )
            if distributed.several():
                os.kill(os.getpid(), signal.SIGTERM)  # the only signal jax handles

    def hold(self) -> None:
        """Makes signals wait for the next boundary: there is unsaved work."""
        self.holds = True

    def release(self) -> None:
        """Lets signals end a single process at once; several end at a boundary."""
        self.holds = distributed.several()

    def at_boundary(self) -> bool:
        """Returns whether to end; all processes must call this equally often."""
        self._boundaries += 1
        if not distributed.several():
            self.reached = self.reached or bool(self.status)
        elif multihost_utils.reached_preemption_sync_point(self._boundaries):
            self.reached = True
        return self.reached

    def end(self, where: str) -> Interrupted:
        """Returns the exception to raise once everything is saved."""
        return Interrupted(
            f"ended {where}; the same command resumes", self.status or RETRY
        )


_CURRENT: ContextVar[Stop] = ContextVar("stop")


def current() -> Stop:
    """Returns the Stop of this program; outside of one, a Stop without signals."""
    return _CURRENT.get(None) or Stop()


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Handles SIGTERM and SIGINT even while the main thread is in C++ code.

    Python runs its signal handlers between two bytecodes of the main thread, so not
    during compilation. The handler of faulthandler runs at once: its output wakes a
    thread, and it can chain to the previous handler, which is jax's in C++.
    """
    stop = Stop()
    outer = _CURRENT.set(stop)
    pipes = []
    for number, chain in (
        (signal.SIGTERM, distributed.several()),
        (signal.SIGINT, False),
    ):
        read, write = os.pipe()
        faulthandler.register(number, file=write, all_threads=False, chain=chain)
        threading.Thread(
            target=stop.listen, args=(number, read), name="signals", daemon=True
        ).start()
        pipes.append((number, write))
    try:
        yield stop
    finally:
        for number, write in pipes:
            faulthandler.unregister(number)
            os.close(write)  # ends the thread
        _CURRENT.reset(outer)
