"""Fair timing: programs in turn, on a machine that does nothing else.

Load slows programs by unequal factors: PyTorch's threads wait for one another and
collapse, XLA's do not, and a pair that is equal on a quiet machine differs by two or
three times. So the load is read before anything is run, a fixed product of matrices is
timed in both libraries between all repetitions, and where either says that others use
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
SIZE = 1024  # of the matrices: 2 * SIZE^3 operations, some 20 ms on two cores

Rate = Callable[[], float]


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
    """Whether the machine is quiet, from when this is made; raises LoadedError if not.

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
        self.load_average = load()
        if self.load_average > MOST_LOAD:
            self._object(
                f"the load average is {self.load_average:.2f}, above {MOST_LOAD}"
            )
        self.rates = matmul_rates() if rates is None else rates
        self.seen: dict[str, list[float]] = {name: [] for name in self.rates}
        for _ in range(3):
            self.look()

    def look(self) -> None:
        """Times the fixed product in every library."""
        for name, rate in self.rates.items():
            self.seen[name].append(rate())
            slow, best = min(self.seen[name]), max(self.seen[name])
            if slow < LEAST_RATE * best:
                self._object(
                    f"a fixed matrix product in {name} ran at {slow:.1f} and at "
                    f"{best:.1f} GFLOP/s"
                )

    def _object(self, trouble: str) -> None:
        if not self.force:
            raise LoadedError(trouble)
        self.trouble = self.trouble or trouble

    def describe(self) -> dict[str, Any]:
        """Returns what was seen, for the report."""
        return {
            "loaded": bool(self.trouble),
            "trouble": self.trouble,
            "load_average": round(self.load_average, 2),
            "matmul_gflops": {
                name: {
                    "best": round(max(seen), 1),
                    "worst": round(min(seen), 1),
                    "spread": round(1 - min(seen) / max(seen), 3),
                }
                for name, seen in self.seen.items()
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
    none always follows the same one.
    """
    timings = {name: Timing(clock(call), []) for name, call in programs.items()}
    for turn in range(repeats):
        watch.look()
        for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
            timings[name].seconds.append(clock(programs[name]))
    watch.look()
    return timings
