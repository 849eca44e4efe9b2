"""Lines on stderr, and the JSON that a run writes: metrics.jsonl and results."""

import contextlib
import json
import logging
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import tqdm

from txl_jax.errors import UserError, printable
from txl_jax.metrics import bits
from txl_jax.report.checksum import DAMAGE, Json
from txl_jax.report.timing import Timing
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import place, write_atomically

# Called with (step, numbers by tag) of each new line of metrics.jsonl.
SendLine = Callable[[int, dict[str, float]], object]

CHECKSUM = "crc32"  # the last key of a line in metrics.jsonl
# Tags of the metrics whose names in metrics.jsonl are shorter, or of another group.
TAGS = {"lr": "train/learning_rate", "valid_nll": "valid/nll"}
GROUPS = {"exact": "train", "timing": "perf"}


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar, in the first process alone.

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
    """Prints the messages of the core, which uses `logging`, as `say` does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one message."""
        say(record.getMessage())


class MetricsLog:
    """Appends to metrics.jsonl: one line every few updates, each step at most once.

    A line is due every `every` updates, at each validation and at the last update. The
    newest is held back until the next update, so that its validation loss can be added;
    a resumed run adds it to the line in the file. Each line ends with its CRC-32. Lines
    that do not fit on a full disk are kept until `sync`. Only process 0 writes.
    """

    def __init__(
        self,
        path: Path,
        last_step: int,
        num_steps: int,
        every: int,
        send: Iterable[SendLine] = (),
        ideal_seconds: float = 0.0,
    ):
        """Opens the file and cuts it to the steps up to last_step; raises UserError.

        send: called for each new line, and for a validation loss that is added later.
        """
        self.step, self.num_steps, self.every = last_step, num_steps, every
        self.send = send
        self.path = path if distributed.is_first() else None
        self.unwritten = b""
        self.timing = Timing(ideal_seconds)
        self.held: Json | None = None
        try:
            kept, damaged = whole_lines(path, last_step) if self.path else ([], 0)
            self._open(kept)
        except OSError as error:
            raise UserError(
                f"cannot write {place(error) or path} ({error.strerror}): free the "
                "disk or fix its permissions, or choose another --workdir"
            ) from error
        if damaged:
            say(f"{path}: {damaged} damaged lines are left out")
        if kept:
            self.timing.totals |= json.loads(kept[-1])["timing"]["total_seconds"]
        if self.path and last_step and not kept:
            say(f"{path} lacks the updates up to {last_step}: their lines are lost")

    def _open(self, lines: list[bytes]) -> None:
        """Replaces the file by these lines, atomically, and opens it for appending."""
        if self.path is not None:
            text = b"".join(lines)
            write_atomically(self.path, lambda fresh: fresh.write_bytes(text))
        self.file = (self.path or Path(os.devnull)).open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, updates: list[Json]) -> dict[str, str]:
        """Logs the metrics of the updates of one call; returns the newest to show."""
        seconds, waited = self.timing.lap(len(updates))
        for exact in updates:
            self._release()
            self.step += 1
            timing = self.timing.add(seconds, waited, exact["tokens"])
            self.held = {"step": self.step, "exact": exact, "timing": timing}
        return {
            "loss": f"{exact['loss']:.4f}",
            "bpc": f"{bits(exact['loss']):.4f}",
            "tokens_per_s": f"{exact['tokens'] / seconds:,.0f}",
            "mfu": f"{self.timing.ideal_seconds / seconds:.1%}",
        }

    def _show(self, line: Json) -> None:
        numbers = {
            TAGS.get(name, f"{GROUPS[group]}/{name}"): float(value)
            for group in GROUPS
            for name, value in line.get(group, {}).items()
            if isinstance(value, (bool, int, float))
        }
        for send in self.send:
            send(line["step"], numbers)

    def sync(self, valid_nll_nats: float | None, owed: bool = False) -> None:
        """Writes all lines to disk, the newest one with its validation loss.

        owed: the newest step is validated, now or after a resume, so its line is due.
        Raises OSError if the disk is full; the next call tries again.
        """
        if valid_nll_nats is not None:
            self._join(valid_nll_nats)
        if self.held:  # with the validation of its step
            self.held["timing"] |= self.timing.so_far()
        self._release(owed)
        self._write()
        if self.path is not None:
            os.fsync(self.file.fileno())

    def _join(self, valid_nll_nats: float) -> None:
        say(f"update {self.step}: valid bpc {bits(valid_nll_nats):.4f}")
        valid = {"valid_nll": valid_nll_nats}
        if self.held:
            self.held["exact"] |= valid
            return
        lines = whole_lines(self.path, self.step)[0] if self.path else []
        if lines and _step(lines[-1]) == self.step:
            line = json.loads(lines.pop())
            line.pop(CHECKSUM)
            line["exact"] |= valid
            self.file.close()
            self._open([*lines, encode(line)])
            self._show({"step": self.step, "exact": valid})

    def _release(self, owed: bool = False) -> None:
        line, self.held = self.held, None
        if line is None:
            return
        step, is_last = line["step"], line["step"] == self.num_steps
        due = step % self.every == 0 or is_last or "valid_nll" in line["exact"]
        if due or owed:
            self._show(line)
            self.unwritten += encode(line)
            self.timing.restart()
            with contextlib.suppress(OSError):  # raised by `sync`
                self._write()

    def _write(self) -> None:
        # A disk that fills up may store part of a line; the next call writes the rest.
        while self.unwritten:
            written = self.file.write(self.unwritten)
            self.unwritten = self.unwritten[written:]


def encode(line: Json) -> bytes:
    """Returns a line of metrics.jsonl with its checksum."""
    body = to_json(line)[:-1]
    return f'{body}, "{CHECKSUM}": {zlib.crc32(body.encode())}}}\n'.encode()


def _step(line: bytes) -> int:
    """Returns the step of a line; raises one of DAMAGE if it has changed."""
    entry = json.loads(line)
    body, _, _ = line.rpartition(f', "{CHECKSUM}": '.encode())
    if entry.pop(CHECKSUM) != zlib.crc32(body):
        raise ValueError("its checksum is wrong")
    return int(entry["step"])


def whole_lines(path: Path, last_step: int) -> tuple[list[bytes], int]:
    """Returns the lines of a metrics.jsonl up to last_step, each step once.

    A kill may leave half a line. The second result is the number of damaged lines.
    """
    kept, damaged, before = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            break
        try:
            step = _step(line)
        except DAMAGE:
            damaged += 1
            continue
        if before < step <= last_step:
            kept.append(line)
            before = step
    return kept, damaged


def last_step(path: Path) -> int:
    """Returns the newest step in a metrics.jsonl; 0 if there is none."""
    try:
        lines, _ = whole_lines(path, 2**62)
    except OSError:
        return 0
    return _step(lines[-1]) if lines else 0


def read_metrics(path: Path) -> list[Json]:
    """Returns the lines of a metrics.jsonl; numbers that are not finite are None."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def spent_seconds(path: Path) -> dict[str, float]:
    """Returns the seconds of a run by purpose, from the last line of metrics.jsonl."""
    lines = read_metrics(path) if path.exists() else []
    return lines[-1]["timing"]["total_seconds"] if lines else {}


def to_json(result: Any, indent: int | None = None) -> str:
    """Returns the result as JSON, with null for NaN and infinity."""

    def valid(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: valid(part) for name, part in x.items()}
        if isinstance(x, (list, tuple)):
            return [valid(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(valid(result), indent=indent, allow_nan=False)


@contextlib.contextmanager
def writing(path: str, field: str) -> Iterator[Path]:
    """Yields the path; raises UserError, naming the config field, if writing fails."""
    try:
        yield Path(path).expanduser()
    except OSError as error:
        raise UserError(
            f"{field} = {path!r} cannot be written ({error.strerror}): choose another"
        ) from error


def require_other(path: str, read: Iterable[Path], field: str) -> None:
    """Raises UserError if the file to write is one of the files to read."""
    target = Path(path).expanduser()
    if path and target.exists() and any(map(target.samefile, read)):
        raise UserError(f"{field} = {path!r} is a text to read: choose another")


@contextlib.contextmanager
def json_lines(path: str, field: str) -> Iterator[Callable[[Any], None]]:
    """Opens a file of JSON lines; yields a function that writes one; "" = nowhere."""
    if not path or not distributed.is_first():
        yield lambda record: None
        return
    with writing(path, field) as target:
        file = target.open("w", encoding="utf-8")
    with file:
        yield lambda record: print(to_json(record), file=file, flush=True)
