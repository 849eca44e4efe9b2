"""The time of a call on a device, and what is known of the device's memory."""

import os
import statistics
from collections.abc import Callable
from typing import Any

import jax

from experiments.benchmarks.quiet import clock

REPEATS = 3
patience = 1.0  # factor of the seconds that a measurement takes


def seconds_of(call: Callable[[], Any], least: float = 0.5) -> float:
    """Returns the median seconds of a call whose result is on the device.

    Calls follow each other without waiting, for `least` seconds in each of three
    repetitions. The first call warms up; a long one is repeated three times.
    """

    def run(count: int) -> Callable[[], None]:
        def program() -> None:
            for _ in range(count):
                result = call()
            jax.block_until_ready(result)

        return program

    run(1)()
    once = clock(run(1))
    if (count := min(round(patience * least / once), 1000)) < 2:
        return statistics.median([once, *(clock(run(1)) for _ in range(REPEATS - 1))])
    return statistics.median(clock(run(count)) / count for _ in range(REPEATS))


def memory_stats() -> dict[str, int]:
    """Returns the first device's memory statistics; {} where jax has none."""
    return jax.local_devices()[0].memory_stats() or {}


def memory_bytes() -> int:
    """Returns the bytes that a device may use: on a CPU, those of the machine."""
    if limit := memory_stats().get("bytes_limit"):
        return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
