"""Trains experiments/shakespeare.py and nanoGPT's CPU recipe, in turn.

    python -m experiments.benchmarks.shakespeare [--target=1.88] [--data_dir=DIR]

Both read 1,536,000 characters of tiny Shakespeare with 0.8 million parameters, and are
validated on all of the held-out tenth. Seconds are those of training, compilation
included, validation excluded. Needs torch.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import record
from experiments.benchmarks.quiet import Watch
from experiments.figures import learning
from txl_jax.cli.prepare import prepare
from txl_jax.data.options import DataConfig
from txl_jax.report.log import read_metrics
from txl_jax.workdir.folder import METRICS

CONFIG = Path(__file__).parents[1] / "shakespeare.py"
EVAL_EVERY = 100
Curve = list[tuple[int, float, float]]  # updates, seconds, nats per character


def ours(data_dir: str, steps: int) -> Curve:
    """Trains experiments/shakespeare.py and returns its curve."""
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "txl_jax.main", f"--config={CONFIG}"]
        command += [f"--workdir={workdir}", f"--config.data.data_dir={data_dir}"]
        command += [
            f"--config.train.num_steps={steps}",
            f"--config.train.eval_every={min(EVAL_EVERY, steps)}",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = read_metrics(Path(workdir) / METRICS)
    return [
        (line["updates"], line["seconds"], line["valid_nats"])
        for line in learning.find_validations(lines)
    ]


def describe(curve: Curve, target: float) -> dict[str, Any]:
    """Returns a curve for the report, and when it first reached the target."""
    reached = next((point for point in curve if point[2] <= target), None)
    return {
        "nats": round(curve[-1][2], 4),
        "seconds": round(curve[-1][1], 1),
        "updates_to_target": reached and reached[0],
        "seconds_to_target": reached and round(reached[1], 1),
        "curve": [
            (step, round(spent, 1), round(loss, 4)) for step, spent, loss in curve
        ],
    }


def measure(args: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    from experiments.benchmarks import nanogpt  # here: `--help` works without torch

    steps = 100 if args.tiny else 2000
    tokens = prepare(DataConfig("shakespeare", data_dir=args.data_dir))
    train, valid = (np.asarray(tokens.split(split)) for split in ("train", "valid"))
    runs = []
    for _ in range(args.repeats):
        watch.look()
        peer = nanogpt.learn(train, valid, len(tokens.vocab), steps, EVAL_EVERY)
        watch.look()
        runs.append({"ours": ours(args.data_dir, steps), "nanogpt": peer})
        watch.look()
    cases = [
        {side: describe(curve, args.target) for side, curve in run.items()}
        for run in runs
    ]
    return {"target_nats": args.target, "runs": cases}


def main() -> None:
    parser = record.make_parser(__doc__, repeats=1)
    parser.add_argument("--target", type=float, default=1.88, help="nats per character")
    parser.add_argument(
        "--data_dir", default="data", help="folder of the prepared text"
    )
    record.run("shakespeare", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
