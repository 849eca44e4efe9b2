"""Progress of long work on data: lines on stderr, none for work that is soon done.

Dims: none.
"""

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]

EVERY_SECONDS = 10.0


def log(line: str) -> None:
    """Prints a line to stderr: stdout's last line is a run's result."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts bytes and says so at most every ten seconds.

    `total` is 0 where nobody knows it before the end.
    """

    def __init__(self, say: Say, what: str, total: int, done: int = 0) -> None:
        self._say, self._what, self._total = say, what, total
        self._first = self._done = done
        self._began = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Counts `count` more bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._said < EVERY_SECONDS:
            return
        self._said = now
        speed = (self._done - self._first) / 1e6 / (now - self._began)
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        self._say(f"data: {self._what}: {self._done:,} bytes{share}, {speed:.1f} MB/s")
