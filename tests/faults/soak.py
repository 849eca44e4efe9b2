"""A long run neither recompiles, nor grows, nor leaks, nor slows down.

    python -m tests.faults.soak --steps=20000

Trains a tiny model, with ROUNDS validations and checkpoints, and prints one JSON line
of what it took, tenth by tenth; the status is 1 where a claim does not hold.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.cli.run import train_on
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.report.log import read_metrics
from txl_jax.runtime import allocator
from txl_jax.train import Hooks
from txl_jax.update.options import OptimConfig, TrainConfig

ROUNDS = 40
COMPILE = "/jax/core/compile/backend_compile_duration"  # jax's event of a compilation
SAVE_HANDLES = 6  # open while checkpoints are written: two event loops, three each
RSS_MB_PER_1000_STEPS = 1.0
SLOWDOWN = 0.15  # what the last tenth may differ from the first in its median speed


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the process holds before one update."""

    step: int
    rss_mb: float
    handles: int
    compilations: int


@dataclasses.dataclass(frozen=True)
class Soaked:
    """A run's samples, one an update, and its speed in tokens a second."""

    samples: list[Sample]
    speed: list[float]

    def tenths(self) -> list[list[Sample]]:
        """Returns the samples in ten parts."""
        size = len(self.samples) // 10
        return [self.samples[n * size : (n + 1) * size] for n in range(10)]

    def compilations(self) -> list[int]:
        """Returns how many there had been at the end of each tenth."""
        return [part[-1].compilations for part in self.tenths()]

    def handles(self) -> list[int]:
        """Returns the fewest open files of each tenth."""
        return [min(sample.handles for sample in part) for part in self.tenths()]

    def rss_mb(self) -> list[float]:
        """Returns the median resident memory of each tenth."""
        return [statistics.median(s.rss_mb for s in part) for part in self.tenths()]

    def rss_slope(self) -> float:
        """Returns the growth in MB per 1,000 updates, after the first tenth."""
        late = self.samples[len(self.samples) // 10 :]
        steps, sizes = [s.step for s in late], [s.rss_mb for s in late]
        return float(np.polyfit(steps, sizes, 1)[0]) * 1000

    def speeds(self) -> list[float]:
        """Returns the median speed of each tenth."""
        parts = np.array_split(self.speed, 10)
        return [statistics.median(part.tolist()) for part in parts]

    def failures(self) -> list[str]:
        """Returns the claims that do not hold, but for those about memory and speed."""
        found = []
        if len(set(self.compilations())) > 1:
            found.append(f"compiled after the first tenth: {self.compilations()}")
        # A leak of one a round would make it ROUNDS / 2 from half to half.
        if min(self.handles()[5:]) > min(self.handles()[:5]) + SAVE_HANDLES:
            found.append(f"open files grow: {self.handles()}")
        return found

    def long_failures(self) -> list[str]:
        """Returns the claims that do not hold and that take a long run to judge."""
        found = []
        if not self.rss_slope() < RSS_MB_PER_1000_STEPS:
            found.append(f"memory grows by {self.rss_slope():.2f} MB per 1,000 updates")
        first, *_, last = self.speeds()
        if not abs(last / first - 1) < SLOWDOWN:
            found.append(f"the speed went from {first:.0f} to {last:.0f} tokens/s")
        return found


def make_config(steps: int) -> Config:
    """Returns a tiny run of so many updates, a multiple of ROUNDS."""
    every = steps // ROUNDS
    return Config(
        model=ModelConfig(
            vocab_size=256,
            n_layer=2,
            d_model=32,
            n_head=2,
            d_head=16,
            d_inner=64,
            mem_len=16,
        ),
        train=TrainConfig(
            num_steps=steps, batch_size=8, tgt_len=16, log_every=1, eval_every=every
        ),
        optim=OptimConfig(lr=1e-3),
        eval=EvalConfig(streams=8, tgt_len=16, mem_len=16),
        checkpoint=CheckpointConfig(every_steps=every),
    )


def soak(steps: int, workdir: Path) -> Soaked:
    """Trains, and returns what was seen before each update."""
    if steps % (10 * ROUNDS):
        raise ValueError(f"steps must be a multiple of {10 * ROUNDS}")
    config = make_config(steps)
    text = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
    samples: list[Sample] = []
    compilations: list[float] = []
    page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE:
            compilations.append(duration_secs)

    def sample() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        handles = len(os.listdir("/proc/self/fd"))
        samples.append(
            Sample(len(samples), pages * page_mb, handles, len(compilations))
        )

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        observers = Hooks(before=[lambda step, state: sample()])
        train_on(config, workdir, text, text[:1000], observers=observers)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    lines = read_metrics(workdir / "metrics.jsonl")
    return Soaked(samples, [line["timing"]["tokens_per_second"] for line in lines])


def main() -> int:
    """Soaks as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    if steps % (10 * ROUNDS):
        parser.error(f"--steps must be a multiple of {10 * ROUNDS}")
    allocator.keep_freed()  # as `txl_jax.main` does
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(steps, Path(folder))
    failures = soaked.failures() + soaked.long_failures()
    result = {
        "steps": steps,
        "compilations": soaked.compilations(),
        "handles": soaked.handles(),
        "rss_mb": soaked.rss_mb(),
        "rss_mb_per_1000_steps": soaked.rss_slope(),
        "tokens_per_second": soaked.speeds(),
        "failures": failures,
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
