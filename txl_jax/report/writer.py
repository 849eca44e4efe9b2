"""What a run says while it runs: a progress line on stderr and lines of metrics."""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import tqdm

from txl_jax import distributed
from txl_jax.errors import UserError
from txl_jax.metrics import bits
from txl_jax.seal import DAMAGE

PLAIN_SECONDS = 10.0  # between plain lines, where stderr is no terminal


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar if there is one.

    Of several processes only the first does. A stderr that takes nothing, such as a
    file on a full disk, ends no run.
    """
    if not distributed.is_first():
        return
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


def nothing(line: dict[str, Any]) -> None:
    """Shows a line nowhere."""


class TrainLog:
    """`metrics.jsonl` and the progress of a training run, update after update.

    Each step is in the file at most once, also after a resume: every `every` updates,
    at each validation and at the last. The newest line is held back until the next, so
    that a validation can join it, also one that a resume makes. Lines that a full disk
    refuses wait for `sync`. Of several processes the first writes the file.
    """

    def __init__(
        self,
        path: Path,
        last_step: int,
        num_steps: int,
        every: int,
        show: Callable[[dict[str, Any]], None] = nothing,
    ):
        """Opens the file for appending, cut to the lines of steps up to last_step.

        show: is given each line as it is written, and of one that a validation joins
        later only that. Raises UserError where it can be neither read nor written.
        """
        self.show = show
        self.path = path if distributed.is_first() else None
        try:
            kept = whole_lines(path, last_step) if self.path else []
            if self.path and last_step and not kept:
                lost = f"no lines of the updates up to {last_step}: they are lost"
                say(f"{path} has {lost}")
            self.unwritten = b""
            self._open(kept)
        except OSError as error:
            raise UserError(
                f"cannot write {path} ({error.strerror}): mend that, or give another "
                "--workdir"
            ) from error
        self.held: dict[str, Any] | None = None
        self.before: list[bytes] | None = None  # lines before a held one in the file
        if kept and (line := json.loads(kept[-1]))["step"] == last_step:
            self.held, self.before = line, kept[:-1]
        self.progress = Progress("train", num_steps, last_step)
        self.step = last_step
        self.num_steps = num_steps
        self.every = every
        self.input_wait_seconds = 0.0  # since the last updates
        self._restart_timing()
        self.restart_clock()

    def _open(self, lines: list[bytes]) -> None:
        """Replaces the file by one of these lines."""
        if self.path is not None:
            fresh = self.path.with_suffix(".tmp")
            fresh.write_bytes(b"".join(lines))
            fresh.replace(self.path)
        self.file = (self.path or Path(os.devnull)).open("ab", buffering=0)

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
        Raises OSError where the disk takes none; a later call tries all of them again.
        """
        if self.held is not None and valid_nll is not None:
            self.held["exact"]["valid_nll"] = valid_nll
            if self.before is not None:
                self.show({"step": self.step, "exact": {"valid_nll": valid_nll}})
            say(f"update {self.step}: valid bpc {bits(valid_nll):.4f}")
        self._release(ends)
        self._write()
        if self.path is not None:
            os.fsync(self.file.fileno())

    def _release(self, in_any_case: bool = False) -> None:
        line, self.held = self.held, None
        before, self.before = self.before, None
        if line is None:
            return
        step, exact = line["step"], line["exact"]
        due = step % self.every == 0 or step == self.num_steps or "valid_nll" in exact
        written = [to_json(line).encode() + b"\n"] if due or in_any_case else []
        if before is not None:
            self.file.close()
            self._open(before + written)
        elif written:
            self.show(line)
            self.unwritten += written[0]
            self._restart_timing()
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


@contextlib.contextmanager
def json_lines(path: str, field: str) -> Iterator[Callable[[Any], None]]:
    """Gives a function that writes one JSON line into a fresh file.

    It does nothing for the path "", and in all processes but the first. Raises
    UserError where the file cannot be made; `field` is what it was given as.
    """
    if not path or not distributed.is_first():
        yield lambda record: None
        return
    try:
        file = Path(path).expanduser().open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{field} = {path!r} cannot be written ({error.strerror}): give another"
        ) from error
    with file:
        yield lambda record: print(to_json(record), file=file, flush=True)


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
        except DAMAGE:
            damaged += 1
            continue
        if before < step <= last_step:
            kept.append(line)
            before = step
    if damaged:
        say(f"{path} has {damaged} damaged lines: they are left out")
    return kept


def last_step(path: Path) -> int:
    """Returns the newest step in a metrics.jsonl; 0 if there is none."""
    try:
        lines = whole_lines(path, 2**62)
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl; what is not finite is None in them."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
