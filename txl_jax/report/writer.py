"""What a run says while it runs: a progress line on stderr and lines of metrics."""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import tqdm

from txl_jax import distributed
from txl_jax.metrics import bits

PLAIN_SECONDS = 10.0  # between plain lines, where stderr is no terminal


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar if there is one.

    Of several processes only the first does.
    """
    if distributed.is_first():
        tqdm.tqdm.write(line, file=sys.stderr)


class Progress:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, label: str, total: int, initial: int = 0):
        self.label = label
        self.total = total
        self.initial = initial
        self.started = self.said = time.perf_counter()
        self.bar = None
        if sys.stderr.isatty() and distributed.is_first():
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
    that a validation can join it, also one that a resume makes. Of several processes
    the first writes the file.
    """

    def __init__(self, path: Path, last_step: int, num_steps: int, every: int):
        """Opens the file for appending, cut to the lines of steps up to last_step."""
        self.path = path if distributed.is_first() else None
        self.held: dict[str, Any] | None = None
        self.before: list[str] | None = None  # lines before a held one that is written
        self._open(kept := self._read(last_step))
        if kept and (line := json.loads(kept[-1]))["step"] == last_step:
            self.held, self.before = line, kept[:-1]
        self.progress = Progress("train", num_steps, last_step)
        self.step = last_step
        self.num_steps = num_steps
        self.every = every
        self.input_wait_seconds = 0.0  # since the last updates
        self._restart_timing()
        self.restart_clock()

    def _read(self, last_step: int) -> list[str]:
        kept: list[str] = []
        if self.path is None or not self.path.exists():
            return kept
        for line in self.path.read_text("utf-8").splitlines(keepends=True):
            # A kill may leave half a line; nothing complete stands after it.
            if not line.endswith("\n") or json.loads(line)["step"] > last_step:
                break
            kept.append(line)
        return kept

    def _open(self, lines: list[str]) -> None:
        """Replaces the file by one of these lines."""
        if self.path is not None:
            fresh = self.path.with_suffix(".tmp")
            fresh.write_text("".join(lines), "utf-8")
            fresh.replace(self.path)
        path = self.path or Path(os.devnull)
        self.file = path.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__()
        self.file.close()

    def restart_clock(self) -> None:
        """Leaves out of the steps' time what has passed since the last updates."""
        self.clock = time.perf_counter()

    @contextlib.contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Counts the time inside as a wait for the next batch."""
        began = time.perf_counter()
        yield
        self.input_wait_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time inside as a checkpoint's, and not as a step's."""
        began = time.perf_counter()
        yield
        self.checkpoint_seconds += time.perf_counter() - began
        self.restart_clock()

    def updates(self, updates: list[dict[str, Any]]) -> None:
        """Takes the metrics of the next updates, in order."""
        now = time.perf_counter()
        seconds = (now - self.clock) / len(updates)
        waited = self.input_wait_seconds / len(updates)
        self.clock, self.input_wait_seconds = now, 0.0
        for exact in updates:
            self._release()
            self.step += 1
            self.count += 1
            self.tokens += exact["tokens"]
            self.seconds += seconds
            self.waited += waited
            timing = self._timing()
            self.held = {"step": self.step, "exact": exact, "timing": timing}
        self.progress(
            self.step,
            loss=f"{exact['loss']:.4f}",
            bpc=f"{bits(exact['loss']):.4f}",
            tokens_per_s=f"{exact['tokens'] / seconds:,.0f}",
        )

    def _restart_timing(self) -> None:
        self.count = self.tokens = 0
        self.seconds = self.waited = self.checkpoint_seconds = 0.0

    def _timing(self) -> dict[str, float]:
        """Returns the means over the updates since the last line.

        A step is computing, which includes what the host does meanwhile, and waiting
        for input. checkpoint_seconds are beside it, and all of those since that line.
        """
        return {
            "step_seconds": self.seconds / self.count,
            "compute_seconds": (self.seconds - self.waited) / self.count,
            "input_wait_seconds": self.waited / self.count,
            "checkpoint_seconds": self.checkpoint_seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }

    def sync(self, valid_nll: float | None, ends: bool = False) -> None:
        """Returns when every line is on the disk; valid_nll joins the newest.

        ends: the newest is written in any case, for a validation that is yet to come.
        """
        if self.held is not None and valid_nll is not None:
            self.held["exact"]["valid_nll"] = valid_nll
            say(f"update {self.step}: valid bpc {bits(valid_nll):.4f}")
        self._release(ends)
        self.file.flush()
        if self.path is not None:
            os.fsync(self.file.fileno())

    def _release(self, in_any_case: bool = False) -> None:
        line, self.held = self.held, None
        before, self.before = self.before, None
        if line is None:
            return
        step, exact = line["step"], line["exact"]
        due = step % self.every == 0 or step == self.num_steps or "valid_nll" in exact
        written = [json.dumps(line) + "\n"] if due or in_any_case else []
        if before is not None:
            self.file.close()
            self._open(before + written)
        elif written:
            self.file.write(written[0])
            self._restart_timing()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
