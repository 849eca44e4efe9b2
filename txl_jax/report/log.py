"""Messages on stderr."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence

import tqdm

from txl_jax.errors import printable
from txl_jax.runtime import distributed

QUIET_SECONDS = 2.0  # shorter waits are not reported


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar, in the first process only.

    A terminal gets no control characters. A full disk behind stderr is ignored.
    """
    if not distributed.is_first():
        return
    line = printable(line) if sys.stderr.isatty() else line
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(line, file=sys.stderr)


def aligned(first: str, cells: Sequence[str], width: int = 0) -> str:
    """Returns a row of a table; the first column is `width` wide, the others 12."""
    return f"{first:<{width}}" + "".join(f"{cell:>12}" for cell in cells)


class Screen(logging.Handler):
    """Prints messages that lower packages send with `logging`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one message."""
        say(record.getMessage())


@contextlib.contextmanager
def log_to_screen() -> Iterator[None]:
    """Prints messages that lower packages send with `logging`, inside the context."""
    logger = logging.getLogger("txl_jax")
    before, level, propagates = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Screen()], False  # orbax adds a root handler
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagates
        logger.setLevel(level)


@contextlib.contextmanager
def waiting(notice: str) -> Iterator[None]:
    """Prints the notice if the context takes over two seconds."""
    timer = threading.Timer(QUIET_SECONDS, say, [notice])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
