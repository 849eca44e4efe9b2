"""A watchdog that ends a process when it makes no progress."""

import faulthandler
import threading
from typing import Self

from txl_jax.errors import RETRY
from txl_jax.runtime import distributed


class Watchdog:
    """Prints all stacks and exits with RETRY after `seconds` > 0 without `feed`."""

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
        """Restarts the countdown."""
        self.fed.set()

    def _watch(self) -> None:
        while self.fed.wait(self.seconds):
            if self.closed:
                return
            self.fed.clear()
        with open(2, "w", closefd=False) as stderr:
            faulthandler.dump_traceback(stderr, all_threads=True)
        distributed.exit_now(
            f"no progress for run.hang_seconds = {self.seconds} s, stacks above; the "
            "same command resumes",
            RETRY,
        )
