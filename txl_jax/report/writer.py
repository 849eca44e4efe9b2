"""What a run says while it runs: a progress line on stderr and lines of metrics."""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Self

import tqdm

from txl_jax.metrics import bits

PLAIN_SECONDS = 10.0  # between plain lines, where stderr is no terminal


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar if there is one.

    A stderr that takes nothing, such as a file on a full disk, ends no run.
    """
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(line, file=sys.stderr)


class Progress:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, label: str, total: int, initial: int = 0):
        self.label = label
        self.total = total
        self.initial = initial
        self.started = self.said = time.perf_counter()
        self.bar = None
        if sys.stderr.isatty():
            # Some terminals, of containers above all, say that they are 0 wide.
            width = shutil.get_terminal_size().columns
            self.bar = tqdm.tqdm(desc=label, total=total, initial=initial, ncols=width)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int = 0, **figures: str) -> None:
        """Shows that `done` of the total are done, with figures such as loss="1.92"."""
        self.total = total or self.total
        text = " ".join(f"{name} {value}" for name, value in figures.items())
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.perf_counter()
        if now - self.said < PLAIN_SECONDS:
            return
        self.said = now
        fraction = (done - self.initial) / max(self.total - self.initial, 1)
        left = (now - self.started) * (1 / fraction - 1) if fraction > 0 else 0.0
        minutes, seconds = divmod(int(left), 60)
        say(f"{self.label} {done}/{self.total} {text} {minutes}:{seconds:02d} left")


class TrainLog:
    """`metrics.jsonl` and the progress of a training run, update after update.

    Each step is in the file at most once, also after a resume: every `every` updates,
    at each validation and at the last. The newest line is held back until the next, so
    that a validation can join it. Lines that a full disk refuses wait for `sync`.
    """

    def __init__(self, path: Path, last_step: int, num_steps: int, every: int):
        """Opens the file for appending, cut to the lines of steps up to last_step."""
        kept = whole_lines(path, last_step)
        if last_step and not kept:
            say(f"{path} has no lines of the updates up to {last_step}: they are lost")
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(path)
        self.file = path.open("ab", buffering=0)
        self.unwritten = b""
        self.progress = Progress("train", num_steps, last_step)
        self.step = last_step
        self.num_steps = num_steps
        self.every = every
        self.held: dict[str, Any] | None = None
        self.restart_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__()
        self.file.close()

    def restart_clock(self) -> None:
        """Leaves out of the timing what has passed since the last updates."""
        self.clock = time.perf_counter()

    def updates(self, updates: list[dict[str, Any]]) -> None:
        """Takes the metrics of the next updates, in order."""
        now = time.perf_counter()
        seconds = (now - self.clock) / len(updates)
        self.clock = now
        for exact in updates:
            self._release()
            self.step += 1
            speed = exact["tokens"] / seconds
            timing = {"step_seconds": seconds, "tokens_per_second": speed}
            self.held = {"step": self.step, "exact": exact, "timing": timing}
        self.progress(
            self.step,
            loss=f"{exact['loss']:.4f}",
            bpc=f"{bits(exact['loss']):.4f}",
            tokens_per_s=f"{speed:,.0f}",
        )

    def sync(self, valid_nll: float | None) -> None:
        """Returns when every line is on the disk; valid_nll joins the newest.

        Raises OSError where the disk takes none; a later call tries all of them again.
        """
        if self.held is not None and valid_nll is not None:
            self.held["exact"]["valid_nll"] = valid_nll
            say(f"update {self.step}: valid bpc {bits(valid_nll):.4f}")
        self._release()
        self._write()
        os.fsync(self.file.fileno())

    def _release(self) -> None:
        line, self.held = self.held, None
        if line is None:
            return
        step, exact = line["step"], line["exact"]
        if step % self.every == 0 or step == self.num_steps or "valid_nll" in exact:
            self.unwritten += to_json(line).encode() + b"\n"
            with contextlib.suppress(OSError):  # `sync` tells
                self._write()

    def _write(self) -> None:
        # After half a line, which is what a disk took before it was full, the next
        # call goes on with the other half.
        while self.unwritten:
            written = self.file.write(self.unwritten)
            self.unwritten = self.unwritten[written:]


def to_json(result: Any, indent: int | None = None) -> str:
    """Returns the result as JSON, which knows no NaN and no infinity: null for them."""

    def valid(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: valid(part) for name, part in x.items()}
        if isinstance(x, (list, tuple)):
            return [valid(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(valid(result), indent=indent, allow_nan=False)


def whole_lines(path: Path, last_step: int) -> list[bytes]:
    """Returns the lines of a metrics.jsonl up to last_step, each step's once.

    A kill may leave half a line at the end; lines that are damaged otherwise are left
    out, and said to be.
    """
    kept, damaged, before = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            break
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            damaged += 1
            continue
        if before < step <= last_step:
            kept.append(line)
            before = step
    if damaged:
        say(f"{path} has {damaged} damaged lines: they are left out")
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl; what is not finite is None in them."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
