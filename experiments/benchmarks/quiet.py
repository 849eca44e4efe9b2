"""Fair timing: programs in turn, on a machine that does nothing else.

Load slows programs by unequal factors: PyTorch's threads wait for one another and
collapse, XLA's do not, and a pair that is equal on a quiet machine differs by two or
three times. So the load is read before anything is run, and a fixed product of matrices
is timed in both libraries before and after every turn. A turn beside which it was slow
is not counted but taken again; where the load, or too many turns, say that others use
the machine nothing is reported.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MOST_LOAD = 1.0  # processes that want to run, averaged over a minute
LEAST_RATE = 0.8  # of the best rate that this process has seen
MOST_TURNS = 4  # taken, for each that counts
SIZE = 1024  # of the matrices: 2 * SIZE^3 operations, some 20 ms on two cores

Rate = Callable[[], float]
Look = dict[str, float]  # per library, the rate of the fixed product, in GFLOP/s


class LoadedError(Exception):
    """Others use the machine; the message says how that was seen."""


def clock(program: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def times(count: int, call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a program that makes so many calls."""

    def program() -> None:
        for _ in range(count):
            call()

    return program


def _rate(product: Callable[[], Any]) -> float:
    """Returns the median rate of five products, in GFLOP/s."""
    product()
    return 2e-9 * SIZE**3 / statistics.median(clock(product) for _ in range(5))


def matmul_rates() -> dict[str, Rate]:
    """Returns, per library that is installed, what times the fixed product in it."""
    x = jnp.ones((SIZE, SIZE))
    multiply = jax.jit(jnp.matmul)
    rates = {"jax": lambda: _rate(lambda: multiply(x, x).block_until_ready())}
    if importlib.util.find_spec("torch"):
        import torch

        y = torch.ones(SIZE, SIZE)
        rates["torch"] = lambda: _rate(lambda: torch.matmul(y, y).sum().item())
    return rates


class Watch:
    """Whether the machine is quiet; raises LoadedError if its load is high already.

    force: go on, and keep in `trouble` what was seen. The load is read only here, since
    what is measured is soon a load itself.
    """

    def __init__(
        self,
        force: bool,
        rates: dict[str, Rate] | None = None,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
    ):
        self.force = force
        self.trouble = ""
        self.retaken = 0  # turns
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
        """Returns the best rate in a library so far."""
        return max(look[name] for look in self.looks)

    def slow(self, look: Look) -> str:
        """Returns what was slow then, by what is known now, or nothing."""
        for name, rate in look.items():
            if rate < LEAST_RATE * self.best(name):
                return (
                    f"a fixed matrix product in {name} ran at {rate:.1f} and at "
                    f"{self.best(name):.1f} GFLOP/s"
                )
        return ""

    def describe(self) -> dict[str, Any]:
        """Returns what was seen, for the report."""
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
    """Seconds of a program: its first call, and those after it."""

    first: float
    seconds: list[float]

    @property
    def median(self) -> float:
        """Seconds of a call when all is compiled and warm."""
        return statistics.median(self.seconds)

    def describe(self, tokens: int) -> dict[str, Any]:
        """Returns the numbers of a call that takes so many tokens (0 = none).

        compile_seconds is how much longer the first call took; it stands for what a
        program compiles and warms up by itself.
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
    """Returns the timing of programs that were called in turn, each `repeats` times.

    A program returns when its work is done. Every other turn goes backwards, so that
    none always follows the same one. Turns beside a slow look do not count: up to
    MOST_TURNS times as many are taken as are to count, and LoadedError is raised if
    too few do. A forced watch counts every turn.
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
