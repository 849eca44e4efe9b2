"""Lines and progress on stderr, and JSON files of a run: metrics.jsonl and results."""

import contextlib
import io
import json
import logging
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import tqdm

from txl_jax.errors import UserError, printable
from txl_jax.metrics import bits
from txl_jax.report.timing import Timing
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.preemption import listening
from txl_jax.runtime.storage import DAMAGE, Json, write_atomically

# A function of (step, numbers by tag), called for each new line of metrics.jsonl.
SendLine = Callable[[int, dict[str, float]], object]

# Tags of metrics whose names in metrics.jsonl are shorter, or belong to another group.
TAGS = {"lr": "train/learning_rate", "valid_nll": "valid/nll"}
GROUPS = {"exact": "train", "timing": "perf"}

EVERY_SECONDS = 10.0  # between lines, where stderr is not a terminal
QUIET_SECONDS = 2.0  # shorter waits are not reported
NARROW = 6  # columns of the narrowest bar and its edges


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


class Lines(logging.Handler):
    """Prints messages of rooms above, which use `logging`, with `say`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one message."""
        say(record.getMessage())


@contextlib.contextmanager
def showing_lines() -> Iterator[None]:
    """Prints messages of rooms above inside the context, as `say` does."""
    logger = logging.getLogger("txl_jax")
    before, level, propagates = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Lines()], False  # orbax adds a root handler
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagates
        logger.setLevel(level)


class Bar(io.StringIO):
    """Receives a bar's output, and prints each state of the bar as a line."""

    def write(self, text: str) -> int:
        """Prints the text unless it is empty."""
        if text.strip():
            say(text.strip())
        return len(text)


class Progress(tqdm.tqdm):
    """A bar on a terminal; elsewhere a line every ten seconds.

    Both have the time that is left, and a rate: with `unit` tqdm's, in this unit,
    otherwise one of the figures. Only the first process shows it.
    """

    total: int | None

    def __init__(
        self, label: str, total: int = 0, done: int = 0, *, unit: str = "tokens"
    ):
        """Starts at `done`, above 0 in a resumed run; total = 0 means unknown."""
        terminal = sys.stderr.isatty()
        self.rate = ["{rate_noinv_fmt}"] if unit else []
        self.figures: tuple[str, ...] = ()
        super().__init__(
            desc=label,
            total=total or None,
            initial=done,
            # Some terminals, mostly in containers, report a width of 0.
            ncols=shutil.get_terminal_size().columns if terminal else 0,
            unit=f" {unit}",
            unit_scale=bool(unit),
            disable=not distributed.is_first(),
            file=None if terminal else Bar(),
            position=None if terminal else 0,  # tqdm moves the cursor for others
            delay=0.0 if terminal else EVERY_SECONDS,
            mininterval=0.1 if terminal else EVERY_SECONDS,
            maxinterval=EVERY_SECONDS,
        )

    def __call__(self, done: int, total: int = 0, /, *figures: str) -> None:
        """Sets the count, a total above 0, and figures such as "loss 1.92"."""
        self.total = total or self.total
        if not self.disable:
            self.figures = figures or self.figures
            self.update(done - self.n)

    def __str__(self) -> str:
        """Returns the bar or line, without the last figures if it were too long."""
        state, columns = self.format_dict, self.ncols
        start, shown = "{desc}: ", ["{n_fmt}"]
        if self.total:
            start += "{percentage:3.0f}% "
            shown = ["{n_fmt}/{total_fmt}", "{remaining} left"]
        shown += [*self.rate, *self.figures, "{elapsed} passed"]

        def text(bar: str = "", ncols: int | None = None) -> str:
            layout = {"bar_format": start + bar + ", ".join(shown), "ncols": ncols}
            return self.format_meter(**{**state, **layout})

        while columns and len(text()) > columns - NARROW and len(shown) > 1:
            shown.pop()
        return text("|{bar}| ", columns) if columns and self.total else text()


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


class MetricsLog:
    """Appends to metrics.jsonl: a line every few updates and one for each validation.

    The last update has a line too. In a line, `exact` has the metrics that a resumed
    run repeats bit by bit, and `timing` those of `Timing`. Lines that a full disk
    refuses are kept until `sync`. Only process 0 writes.
    """

    def __init__(
        self,
        path: Path,
        last_step: int,
        num_steps: int,
        every: int,
        send: Iterable[SendLine] = (),
        ideal_seconds: float = 0.0,
        has_validation: bool = True,
    ):
        """Opens the file and cuts it to the steps up to last_step; raises OSError.

        send: called for each new line. has_validation: the validation of last_step is
        not repeated, so its line stays.
        """
        self.step, self.num_steps, self.every = last_step, num_steps, every
        self.send = send
        self.path = path if distributed.is_first() else None
        self.unwritten = b""
        self.timing = Timing(ideal_seconds)
        lines = [
            line
            for line in (read_metrics(path) if self.path else [])
            if line["step"] < last_step
            or (line["step"] == last_step and (has_validation or _is_update(line)))
        ]
        if self.path:
            write_atomically(path, b"".join(map(_encode, lines)))
        self.file = (self.path or Path(os.devnull)).open("ab", buffering=0)
        if lines:
            self.timing.totals |= lines[-1]["timing"]["total_seconds"]
        elif self.path and last_step:
            say(f"{path} lacks the updates up to {last_step}: their lines are lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, updates: list[Json]) -> list[str]:
        """Logs the metrics of the updates of one call; returns the newest to show."""
        seconds, waited = self.timing.lap(len(updates))
        for exact in updates:
            self.step += 1
            timing = self.timing.add(seconds, waited, exact["tokens"])
            if self.step % self.every == 0 or self.step == self.num_steps:
                self._add(exact, timing)
                self.timing.restart()
        rate = tqdm.tqdm.format_sizeof(exact["tokens"] / seconds)
        return [
            f"{rate} tokens/s",
            f"loss {exact['loss']:.4f}",
            f"{bits(exact['loss']):.4f} bits/token",
            f"mfu {self.timing.ideal_seconds / seconds:.1%}",
        ]

    def log_validation(self, valid_nll_nats: float) -> None:
        """Logs the validation of the newest update."""
        say(f"update {self.step}: valid {bits(valid_nll_nats):.4f} bits/token")
        self._add({"valid_nll": valid_nll_nats}, self.timing.so_far())

    def sync(self) -> None:
        """Forces all lines to disk; raises OSError if it is full."""
        self._write()
        if self.path is not None:
            os.fsync(self.file.fileno())

    def _add(self, exact: Json, timing: Json) -> None:
        line: Json = {"step": self.step, "exact": exact, "timing": timing}
        numbers = {
            TAGS.get(name, f"{GROUPS[group]}/{name}"): float(value)
            for group in GROUPS
            for name, value in line[group].items()
            if isinstance(value, (bool, int, float))
        }
        for send in self.send:
            send(self.step, numbers)
        self.unwritten += _encode(line)
        with contextlib.suppress(OSError):  # raised by `sync`
            self._write()

    def _write(self) -> None:
        # A disk that fills up may store part of a line; the next call writes the rest.
        while self.unwritten:
            written = self.file.write(self.unwritten)
            self.unwritten = self.unwritten[written:]


def _encode(line: Json) -> bytes:
    return f"{to_json(line)}\n".encode()


def _is_update(line: Json) -> bool:
    return "valid_nll" not in line["exact"]


def read_metrics(path: Path) -> list[Json]:
    """Returns the lines of a metrics.jsonl; numbers that are not finite are None.

    Half a line, which a kill may leave, is omitted. A missing file has no lines.
    """
    lines: list[Json] = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(*DAMAGE):
            line = json.loads(text)
            lines += [line] if {"step", "exact", "timing"} <= line.keys() else []
    return lines


def spent_seconds(path: Path) -> dict[str, float]:
    """Returns the seconds of a run by purpose, from the last line of metrics.jsonl."""
    lines = read_metrics(path)
    return lines[-1]["timing"]["total_seconds"] if lines else {}


def to_json(result: object, indent: int | None = None) -> str:
    """Returns the result as JSON, with null for NaN and infinity."""

    def valid(x: object) -> object:
        if isinstance(x, dict):
            return {name: valid(part) for name, part in x.items()}
        if isinstance(x, (list, tuple)):
            return [valid(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(valid(result), indent=indent, allow_nan=False)


@contextlib.contextmanager
def writing(path: str, field: str) -> Iterator[io.BytesIO]:
    """Opens a file with `storage.replacing`, in the first process; "" = nowhere."""
    if path and distributed.is_first():
        with storage.replacing(storage.local_path(path, field)) as file:
            yield file
    else:
        yield io.BytesIO()


def require_other(path: str, read: Iterable[Path], field: str) -> None:
    """Raises UserError if a file to write is one of the files to read."""
    target = storage.local_path(path, field)
    if path and target.exists() and any(map(target.samefile, read)):
        raise UserError(f"{field} = {path!r} is a text to read: choose another")


@contextlib.contextmanager
def json_lines(path: str, field: str) -> Iterator[Callable[[Json], None]]:
    """Opens a file of JSON lines; yields a function that writes one; "" = nowhere.

    The file is PATH.incomplete until the context has ended without an error.
    """
    if not path or not distributed.is_first():
        yield lambda record: None
        return
    target = storage.local_path(path, field)
    fresh = target
    if is_file := target.is_file() or not target.exists():  # no pipe, no device
        target = Path(os.path.realpath(target))
        fresh = Path(f"{target}.incomplete")
    with storage.naming(target):
        file = fresh.open("w", encoding="utf-8")
    with file, listening(f"ended by a signal: {fresh} is incomplete"):
        yield lambda record: print(to_json(record), file=file, flush=True)
    if is_file:
        fresh.replace(target)
