"""The end of a process that hangs, such as one that waits for a process that hangs."""

import faulthandler
import threading
from typing import Self

from txl_jax import distributed
from txl_jax.errors import AGAIN


class Watchdog:
    """Ends the process with status AGAIN when it is not fed for so many seconds.

    The stacks of all threads go to stderr first, to show where it hung. seconds = 0
    watches nothing.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.fed = threading.Event()
        self.closed = False

    def __enter__(self) -> Self:
        if self.seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self.fed.set()

    def feed(self) -> None:
        """Says that the process makes progress."""
        self.fed.set()

    def _watch(self) -> None:
        while self.fed.wait(self.seconds):
            if self.closed:
                return
            self.fed.clear()
        with open(2, "w", closefd=False) as stderr:
            faulthandler.dump_traceback(stderr, all_threads=True)
        distributed.leave(
            f"no progress for run.hang_seconds = {self.seconds} s, stacks above; the "
            "same command goes on",
            AGAIN,
        )
