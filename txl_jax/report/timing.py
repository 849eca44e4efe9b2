"""Wall-clock time of a run by purpose."""

import contextlib
import datetime
import time
from collections.abc import Iterator
from typing import TypeVar

from txl_jax.report.checksum import Json

Batch = TypeVar("Batch")

PURPOSES = ("update", "input", "compile", "checkpoint", "evaluation")


class Timing:
    """Mean times of the updates since the last line of metrics.jsonl, and totals.

    An update's time, between two fetches of metrics, includes the wait for input only.
    `totals`, in seconds by purpose, continue those of an interrupted run.
    """

    def __init__(self, ideal_seconds: float = 0.0) -> None:
        """ideal_seconds: of an update, at the peak of all devices."""
        self.ideal_seconds = ideal_seconds
        self.totals = dict.fromkeys(PURPOSES, 0.0)
        self.input_seconds = 0.0  # since the last fetch
        self.clock = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Resets the means for the next line."""
        self.count = self.tokens = 0
        self.seconds = self.waited = 0.0

    def inputs(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the batches, and measures how long each `next` takes."""
        while True:
            start = time.perf_counter()
            batch = next(batches)
            self.input_seconds += time.perf_counter() - start
            yield batch

    @contextlib.contextmanager
    def spend(self, purpose: str) -> Iterator[None]:
        """Adds the time inside to a total, and excludes it from the updates'."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.totals[purpose] += seconds
        self.clock += seconds

    def lap(self, updates: int) -> tuple[float, float]:
        """Returns the seconds per update since the last lap: (all, input)."""
        now = time.perf_counter()
        seconds, waited = now - self.clock, self.input_seconds
        self.clock, self.input_seconds = now, 0.0
        self.totals["update"] += seconds - waited
        self.totals["input"] += waited
        return seconds / updates, waited / updates

    def add(self, seconds: float, waited: float, tokens: int) -> Json:
        """Adds one update; returns the `timing` group of its line."""
        self.count += 1
        self.tokens += tokens
        self.seconds += seconds
        self.waited += waited
        return {
            "step_seconds": self.seconds / self.count,
            "input_wait_seconds": self.waited / self.count,
            "tokens_per_second": self.tokens / self.seconds,
            "mfu": self.count * self.ideal_seconds / self.seconds,
            **self.so_far(),
        }

    def so_far(self) -> Json:
        """Returns the time of day, in UTC, and the totals until then."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return {"time": now, "total_seconds": dict(self.totals)}
