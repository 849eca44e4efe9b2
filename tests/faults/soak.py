"""A long run neither recompiles, nor grows, nor leaks.

    python -m tests.faults.soak --steps=20000

Trains a tiny model, with ROUNDS validations and checkpoints, and prints one JSON line
with its figures, tenth by tenth; the status is 1 if a claim does not hold.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.cli.training_run import train_on
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.report.metrics_log import read_metrics
from txl_jax.runtime import allocator
from txl_jax.update.options import OptimConfig, TrainConfig

ROUNDS = 40
COMPILE = "/jax/core/compile/backend_compile_duration"  # jax's event for a compilation
SAVE_HANDLES = 6  # open while checkpoints are written: three for each of 2 event loops
RSS_MB_PER_1000_STEPS = 1.0

MODEL = ModelConfig(
    vocab_size=256, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16
)


def soak(steps: int, workdir: Path) -> dict[str, list[float]]:
    """Trains; returns samples after each update, and each update's speed."""
    every = steps // ROUNDS
    train = TrainConfig(
        num_steps=steps, batch_size=8, tgt_len=16, log_every=1, eval_every=every
    )
    config = Config(
        model=MODEL,
        train=train,
        optim=OptimConfig(lr=1e-3),
        eval=EvalConfig(streams=8, tgt_len=16, mem_len=16),
        checkpoint=CheckpointConfig(every_steps=every),
    )
    text = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
    samples: dict[str, list[float]] = {"compilations": [], "handles": [], "rss_mb": []}
    compilations: list[float] = []
    page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE:
            compilations.append(duration_secs)

    def sample(step: int, numbers: dict[str, float]) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        samples["compilations"].append(len(compilations))
        samples["handles"].append(len(os.listdir("/proc/self/fd")))
        samples["rss_mb"].append(pages * page_mb)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        train_on(config, workdir, text, text[:1000], send_line=sample)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    lines = read_metrics(workdir / "metrics.jsonl")
    timings = [line["timing"] for line in lines if "loss" in line["exact"]]
    speed = [timing["tokens_per_second"] for timing in timings]
    return samples | {"tokens_per_second": speed}


def summarize(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the figures of each tenth of the run, and the claims that do not hold."""
    figures: dict[str, Callable[..., Any]] = {
        "compilations": np.max,
        "handles": np.min,
        "rss_mb": np.median,
        "tokens_per_second": np.median,
    }
    result: dict[str, Any] = {
        name: [float(figure(part)) for part in np.array_split(samples[name], 10)]
        for name, figure in figures.items()
    }
    late = np.arange(len(samples["rss_mb"]) // 10, len(samples["rss_mb"]))
    slope = float(np.polyfit(late, np.take(samples["rss_mb"], late), 1)[0]) * 1000
    compilations, handles = result["compilations"], result["handles"]
    failures = []
    if len(set(compilations)) > 1:
        failures.append(f"compiled after the first tenth: {compilations}")
    # A leak of one handle a round would add ROUNDS / 2 from half to half.
    if min(handles[5:]) > min(handles[:5]) + SAVE_HANDLES:
        failures.append(f"open files grow: {handles}")
    if not slope < RSS_MB_PER_1000_STEPS:
        failures.append(f"memory grows by {slope:.2f} MB per 1,000 updates")
    return result | {"rss_mb_per_1000_steps": slope, "failures": failures}


def main() -> int:
    """Soaks for the number of steps on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    if steps % (10 * ROUNDS):
        parser.error(f"--steps must be a multiple of {10 * ROUNDS}")
    allocator.keep_freed()  # as `txl_jax.main` does
    with tempfile.TemporaryDirectory() as folder:
        result = summarize(soak(steps, Path(folder)))
    print(json.dumps({"steps": steps, **result}))
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
