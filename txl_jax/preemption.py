"""Signals that end a run without losing an update.

SIGTERM (a spot machine or Slurm takes the node back) and SIGINT (Ctrl-C) let the run
end at the next boundary: after an update, or after a segment of an evaluation. Where
nothing would be lost they end it at once; so does a second SIGINT.

Of several processes any may get the signal. jax's preemption service lets all of them
end at the same boundary: it agrees in the background on the next one that none has
reached, and costs no collective.
"""

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

from jax.experimental import multihost_utils

from txl_jax import distributed
from txl_jax.errors import AGAIN, INTERRUPTED, Interrupted

HEAD = b"(most recent call first)"  # once in what faulthandler writes for a signal


class Stop:
    """Whether this run is to end; the one instance is `stop`.

    asked: the status to end with, once this process got a signal. reached: once
    `at_boundary` has said so. holds: ending at once would lose something.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.reached = False
        self.holds = False
        self._boundaries = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM and SIGINT, whatever the main thread is at, compiling too.

        Python runs its own handlers in the main thread alone, between two of its
        instructions. faulthandler's runs at once; what it writes wakes a thread of
        ours, and it can call the handler that was there before, jax's in C.
        """
        self.release()
        several = distributed.several()
        ends = []
        for number, chain in ((signal.SIGTERM, several), (signal.SIGINT, False)):
            read, write = os.pipe()
            faulthandler.register(number, file=write, all_threads=False, chain=chain)
            target = threading.Thread(
                target=self._listen, args=(number, read), name="signals", daemon=True
            )
            target.start()
            ends.append((number, write))
        try:
            yield
        finally:
            for number, write in ends:
                faulthandler.unregister(number)
                os.close(write)  # which ends the thread

    def _listen(self, number: signal.Signals, read: int) -> None:
        count = 0
        with open(read, "rb", buffering=0) as pipe:
            while written := pipe.read(65536):
                for _ in range(written.count(HEAD)):
                    count += 1
                    self._take(number, count)

    def _take(self, number: signal.Signals, count: int) -> None:
        status = INTERRUPTED if number == signal.SIGINT else AGAIN
        if not self.holds or (number == signal.SIGINT and count > 1):
            line = f"{number.name}: ended at once; the same command goes on"
            distributed.leave(line, status)
        self.asked = self.asked or status
        if number == signal.SIGINT:
            distributed.warn("SIGINT: ending after this update; another ends at once")
            if distributed.several():
                os.kill(os.getpid(), signal.SIGTERM)  # jax listens to this one alone

    def hold(self) -> None:
        """Says that from here on ending at once would lose an update."""
        self.holds = True

    def release(self) -> None:
        """Says that all is saved. One process of several still waits for the others."""
        self.holds = distributed.several()

    def at_boundary(self) -> bool:
        """Returns whether the run is to end here; True on all processes or on none.

        All processes call it as often, in the same order.
        """
        self._boundaries += 1
        if not distributed.several():
            self.reached = self.reached or bool(self.asked)
        elif multihost_utils.reached_preemption_sync_point(self._boundaries):
            self.reached = True
        return self.reached

    def end(self, where: str) -> Interrupted:
        """Returns what to raise once everything is saved."""
        status = self.asked or AGAIN
        return Interrupted(f"ended {where}; the same command goes on", status)


stop = Stop()
