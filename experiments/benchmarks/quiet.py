"""Fair timing: programs take turns on a machine without other load.

Load slows programs by unequal factors. PyTorch's threads wait for one another, XLA's do
not, so two programs that are equally fast on a quiet machine can differ by a factor of
two or three on a loaded one. The load average is therefore read before anything runs,
and a fixed matrix product is timed in both libraries before and after every turn. A
turn next to a slow product is discarded and repeated. If the load average is high or
too many turns are slow, nothing is reported.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MOST_LOAD = 1.0  # runnable processes, the average of a minute
LEAST_RATE = 0.8  # relative to the best rate in this process
MOST_TURNS = 4  # turns measured for each turn that counts
SIZE = 1024  # of a matrix's sides: 2 * SIZE^3 FLOPs take about 20 ms on two cores

Rate = Callable[[], float]
Look = dict[str, float]  # the rate of the fixed product by library, in GFLOP/s


class LoadedError(Exception):
    """Raised when other processes load the machine; the message gives the evidence."""


def clock(program: Callable[[], Any]) -> float:
    """Returns the duration of a call in seconds."""
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def times(count: int, call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a program that makes `count` calls."""

    def program() -> None:
        for _ in range(count):
            call()

    return program


def _rate(product: Callable[[], Any]) -> float:
    """Returns the median rate of five products, in GFLOP/s."""
    product()
    return 2e-9 * SIZE**3 / statistics.median(clock(product) for _ in range(5))


def matmul_rates() -> dict[str, Rate]:
    """Returns a function for each installed library that times the fixed product."""
    x = jnp.ones((SIZE, SIZE))
    multiply = jax.jit(jnp.matmul)
    rates = {"jax": lambda: _rate(lambda: multiply(x, x).block_until_ready())}
    if importlib.util.find_spec("torch"):
        import torch

        y = torch.ones(SIZE, SIZE)
        rates["torch"] = lambda: _rate(lambda: torch.matmul(y, y).sum().item())
    return rates


class Watch:
    """Checks that the machine is quiet; raises LoadedError if it is not.

    force: continue on a loaded machine, and describe its load in `trouble`. The load
    average is read only here, because the benchmark itself raises it.
    """

    def __init__(
        self,
        force: bool,
        rates: dict[str, Rate] | None = None,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
    ):
        self.force = force
        self.trouble = ""
        self.retaken = 0  # turns that were repeated
        self.load_average = load()
        if self.load_average > MOST_LOAD:
            self.trouble = (
                f"the load average is {self.load_average:.2f}, above {MOST_LOAD}"
            )
            if not force:
                raise LoadedError(self.trouble)
        self.rates = matmul_rates() if rates is None else rates
        self.looks: list[Look] = []

    def look(self) -> Look:
        """Times the fixed product in every library."""
        self.looks.append({name: rate() for name, rate in self.rates.items()})
        return self.looks[-1]

    def best(self, name: str) -> float:
        """Returns the best rate of a library so far."""
        return max(look[name] for look in self.looks)

    def slow(self, look: Look) -> str:
        """Describes the library that was slow, by the best rates so far, or ""."""
        for name, rate in look.items():
            if rate < LEAST_RATE * self.best(name):
                return (
                    f"a fixed matrix product in {name} ran at {rate:.1f} and at "
                    f"{self.best(name):.1f} GFLOP/s"
                )
        return ""

    def describe(self) -> dict[str, Any]:
        """Returns the load and the rates, for the report."""
        rates = {
            name: (self.best(name), min(look[name] for look in self.looks))
            for name in self.rates
        }
        return {
            "loaded": bool(self.trouble),
            "trouble": self.trouble,
            "turns_retaken": self.retaken,
            "load_average": round(self.load_average, 2),
            "matmul_gflops": {
                name: {
                    "best": round(best, 1),
                    "worst": round(worst, 1),
                    "spread": round(1 - worst / best, 3),
                }
                for name, (best, worst) in rates.items()
            },
        }


class Timing(NamedTuple):
    """The seconds of a program's first call, and of each later one."""

    first: float
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median seconds of a call after the first, which compiles."""
        return statistics.median(self.seconds)

    def describe(self, tokens: int) -> dict[str, Any]:
        """Returns the timings for the report; tokens: number in each call, 0 = none.

        compile_seconds is the first call's time beyond the median: compilation and
        warm-up.
        """
        spread = (max(self.seconds) - min(self.seconds)) / self.median
        rate = {"tokens_per_second": round(tokens / self.median, 2)} if tokens else {}
        return rate | {
            "seconds": [round(taken, 4) for taken in self.seconds],
            "median_seconds": round(self.median, 5),
            "spread": round(spread, 3),
            "compile_seconds": round(max(self.first - self.median, 0), 2),
        }


def alternate(
    programs: Mapping[str, Callable[[], Any]], repeats: int, watch: Watch
) -> dict[str, Timing]:
    """Times the programs in turn until `repeats` turns count.

    A program must return only when its work is done. Every other turn runs in reverse
    order, so that no program always follows the same one. Turns next to a slow look do
    not count. Raises LoadedError if too few of MOST_TURNS * repeats turns count. With
    watch.force every turn counts.
    """
    first = {name: clock(call) for name, call in programs.items()}
    looks = [watch.look()]
    turns: list[dict[str, float]] = []
    counted: list[dict[str, float]] = []
    while len(counted) < repeats:
        if len(turns) == MOST_TURNS * repeats:
            raise LoadedError(
                f"{len(turns) - len(counted)} of {len(turns)} turns do not count, for "
                + next(filter(None, map(watch.slow, looks)))
            )
        order = list(programs)[:: 1 if len(counted) % 2 == 0 else -1]
        turns.append({name: clock(programs[name]) for name in order})
        looks.append(watch.look())
        counts = [watch.force or not watch.slow(look) for look in looks]
        counted = [
            turn
            for turn, before, after in zip(turns, counts, counts[1:], strict=False)
            if before and after
        ]
    if watch.force:
        watch.trouble = watch.trouble or next(filter(None, map(watch.slow, looks)), "")
    watch.retaken += len(turns) - len(counted)
    return {
        name: Timing(first[name], [turn[name] for turn in counted]) for name in programs
    }
