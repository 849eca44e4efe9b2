"""Time of a run: by purpose, against the devices' peak FLOP/s, and as a trace."""

import contextlib
import datetime
import functools
import re
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from txl_jax.kernels.product import float32_product
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json

Batch = TypeVar("Batch")

PURPOSES = ("update", "input", "compile", "checkpoint", "evaluation")


class Timing:
    """Mean times of the updates since the last line of metrics.jsonl, and totals.

    An update's time is the time between two fetches, without compilation, saves and
    validation; waiting for input is included. `totals`, in seconds by purpose, continue
    an interrupted run's.
    """

    def __init__(self, ideal_seconds: float = 0.0) -> None:
        """ideal_seconds: duration of an update at the peak of all devices."""
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
        """Yields the batches, and measures the duration of each `next`."""
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


# A jax device's rate of dense bfloat16 products (float16 on T4), from Google's pages of
# chips (cloud.google.com/tpu/docs/v4 and so on) and NVIDIA's data sheets, without
# sparsity, read in November 2026. On v2 and v3 a device is one of two cores.
PEAK_FLOPS = {
    **{"TPU v2": 22.5e12, "TPU v3": 61.5e12, "TPU v4": 275e12},
    **{"TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12},
    **{"TPU v6 lite": 918e12, "TPU v6e": 918e12},
    **{"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12},
    **{"GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12},
    **{"L4": 121e12, "T4": 65e12},
}
# Sizes of the matrices whose product is timed if no peak is known: it must take much
# longer than its dispatch.
CPU_SIZE, SIZE = 1024, 8192
REPEATS = 6  # the first one compiles


def peak_flops(dtype: DTypeLike) -> float:
    """Returns the peak FLOP/s of all devices, measured in the dtype if not known."""
    device = jax.local_devices()[0]
    if peak := known_peak(device.device_kind):
        return peak * jax.device_count()
    # The CPU devices of a process share its cores.
    count = jax.process_count() if device.platform == "cpu" else jax.device_count()
    return measured_peak(dtype) * count


def known_peak(device_kind: str) -> float:
    """Returns the peak FLOP/s of a kind of device, or 0 if PEAK_FLOPS lacks it."""
    names = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_kind)]
    return PEAK_FLOPS[max(names, key=len)] if names else 0.0


def measured_peak(dtype: DTypeLike) -> float:
    """Returns the FLOP/s of a product of square matrices, the best of a few."""
    device = jax.local_devices()[0]
    size = CPU_SIZE if device.platform == "cpu" else SIZE
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    multiply = jax.jit(functools.partial(float32_product, "BD,FD->BF"))
    seconds = timeit.repeat(
        lambda: multiply(x, x).block_until_ready(), number=1, repeat=REPEATS
    )
    return 2 * size**3 / min(seconds)


TRACED = 10  # updates


class Trace:
    """Traces, in the first process, the updates from `first`, counted from 1, on."""

    def __init__(self, first: int, step: int, folder: Path):
        """step: number of updates made so far; only a later `first` is traced."""
        self.begins_after = first - 1 if first > step and distributed.is_first() else -1
        self.ends_after = 0  # 0 = not running
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ends_after:
            jax.profiler.stop_trace()
            self.ends_after = 0

    def before(self, step: int, state: object) -> None:
        """Starts or ends the trace after `step` updates were dispatched."""
        if self.ends_after and step >= self.ends_after:
            jax.block_until_ready(state)
            self.__exit__()
        elif 0 <= self.begins_after <= step:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.begins_after, self.ends_after = -1, step + TRACED
