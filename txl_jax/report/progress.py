"""Progress of long work: a bar on a terminal, occasional lines elsewhere."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, Self

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


class Progress:
    """Counts finished work, and reports it with a rate or the caller's figures.

    Rate and time left count from the first report on, without compilation. Without a
    terminal, quick work prints nothing. total = 0 means unknown.
    """

    def __init__(
        self, label: str, total: int = 0, done: int = 0, *, in_bytes: bool = False
    ):
        """Starts at `done`, which is above 0 in a resumed run."""
        self.label, self.total, self.in_bytes = label, total, in_bytes
        self.done = done
        self.reported = time.perf_counter()
        self.started = 0.0  # at the first report
        self.bar: tqdm.tqdm[NoReturn] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def add(self, count: int) -> None:
        """Adds `count` to the work done."""
        self(self.done + count)

    def __call__(self, done: int, total: int = 0, /, **figures: str) -> None:
        """Sets the count, a total above 0, and figures such as loss="1.92"."""
        self.done, self.total = done, total or self.total
        text = " ".join(f"{name} {value}" for name, value in figures.items())
        if not self.started:
            self.initial, self.started = done, time.perf_counter()
            if sys.stderr.isatty() and distributed.is_first():
                self.bar = tqdm.tqdm(
                    desc=self.label,
                    total=self.total or None,
                    initial=done,
                    # Some terminals, mostly of containers, report a width of 0.
                    ncols=shutil.get_terminal_size().columns,
                    unit="B" if self.in_bytes else "it",
                    unit_scale=self.in_bytes,
                )
        if self.bar is not None:
            self.bar.total = self.total or None
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
        elif (now := time.perf_counter()) - self.reported >= EVERY_SECONDS:
            self.reported = now
            say(self._line(text, now - self.started))

    def _line(self, text: str, seconds: float) -> str:
        made, remaining = self.done - self.initial, self.total - self.done
        count = f"{self.done}/{self.total}" if self.total else f"{self.done}"
        parts = [self.label, count, text]
        if self.in_bytes:
            rate = f" {made / 1e6 / seconds:.1f} MB/s" if made > 0 else ""
            parts.append(f"bytes{rate}")
        if self.total and made > 0:
            minutes, rest = divmod(int(seconds * remaining / made), 60)
            parts.append(f"{minutes}:{rest:02d} left")
        return " ".join(filter(None, parts))


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
    name: str, step: Lowers, *args: object, options: dict[str, str] | None = None
) -> jax.stages.Compiled:
    """Compiles a step for `args`, with the compiler's options; reports a long wait.

    All processes have compiled when it returns: see `distributed.wait_for_all`.
    """
    with waiting(f"compiling {name}"):
        program = step.lower(*args).compile(options)
    distributed.wait_for_all()
    return program
