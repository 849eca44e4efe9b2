"""Progress of long work: a bar on a terminal, occasional lines elsewhere."""

import contextlib
import io
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import tqdm

from txl_jax.report.log import say
from txl_jax.runtime import distributed

EVERY_SECONDS = 10.0  # between lines, where stderr is not a terminal
QUIET_SECONDS = 2.0  # shorter waits are not reported


class Lowers(Protocol):
    """A jitted function, or anything else that lowers to a program."""

    @property
    def lower(self) -> Callable[..., jax.stages.Lowered]:
        """Lowers the function for arguments or their shapes."""


class Lines(io.StringIO):
    """Takes a bar's output, and prints each of its states as a line."""

    def write(self, text: str) -> int:
        """Prints the text unless it is empty."""
        if text.strip():
            say(text.strip())
        return len(text)


class Progress(tqdm.tqdm):
    """A bar on a terminal; elsewhere a line every ten seconds.

    Only the first process shows it.
    """

    total: int | None

    def __init__(
        self, label: str, total: int = 0, done: int = 0, *, in_bytes: bool = False
    ):
        """Starts at `done`, which is above 0 in a resumed run; total = 0 is unknown."""
        terminal = sys.stderr.isatty()
        super().__init__(
            desc=label,
            total=total or None,
            initial=done,
            # Some terminals, mostly of containers, report a width of 0.
            ncols=shutil.get_terminal_size().columns if terminal else 0,
            unit="B" if in_bytes else "it",
            unit_scale=in_bytes,
            disable=not distributed.is_first(),
            file=None if terminal else Lines(),
            position=None if terminal else 0,  # tqdm moves the cursor for others
            delay=0.0 if terminal else EVERY_SECONDS,
            mininterval=0.1 if terminal else EVERY_SECONDS,
            maxinterval=EVERY_SECONDS,
        )

    def __call__(self, done: int, total: int = 0, /, **figures: str) -> None:
        """Sets the count, a total above 0, and figures such as loss="1.92"."""
        self.total = total or self.total
        if not self.disable:
            text = " ".join(f"{name} {value}" for name, value in figures.items())
            self.set_postfix_str(text, refresh=False)
            self.update(done - self.n)


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


def compile_step(
    name: str, step: Lowers, *args: object, options: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Compiles a step for `args`, with the compiler's options; reports a long wait.

    All processes have compiled when it returns: see `distributed.wait_for_all`.
    """
    with waiting(f"compiling {name}"):
        program = step.lower(*args).compile(options)
    distributed.wait_for_all()
    return program
