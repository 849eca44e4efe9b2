"""metrics.jsonl: the metrics of a run's updates and validations, one line each."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import tqdm

from txl_jax.metrics import bits
from txl_jax.report.log import say
from txl_jax.report.output import to_json
from txl_jax.report.timing import Timing
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import DAMAGE, Json, write_atomically

# A function of (step, numbers by tag), called for each new line of metrics.jsonl.
SendLine = Callable[[int, dict[str, float]], object]

# Tags of metrics whose names in metrics.jsonl are shorter, or belong to another group.
TAGS = {"lr": "train/learning_rate", "valid_nll": "valid/nll"}
GROUPS = {"exact": "train", "timing": "perf"}


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
        newest = updates[-1]
        rate = tqdm.tqdm.format_sizeof(newest["tokens"] / seconds)
        return [
            f"{rate} tokens/s",
            f"loss {newest['loss']:.4f}",
            f"{bits(newest['loss']):.4f} bits/token",
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
