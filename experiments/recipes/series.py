"""A time series as numbers: writes one, and draws how a model continues it.

    python -m txl_jax.experiments.recipes.series write
    python -m txl_jax.experiments.recipes.series draw --samples=sample.npy \\
        --picture=series.png

The series solves the Mackey-Glass equation with a delay of 17, a standard example of
chaos: x'(t) = 0.2 x(t - 17) / (1 + x(t - 17)^10) - 0.1 x(t). It is quantised to LEVELS
numbers. `write` makes series.npy, for training, and context.txt, the prompt, which
follows it; `draw` compares continuations of that prompt with the series itself.
The repository's docs/tutorial/sequences.md has the commands between the two.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from txl_jax.errors import UserError

from ..figures import program

LEVELS, LOW, HIGH = 128, 0.2, 1.4  # how many numbers; values of the first and the last
TRAINED, CONTEXT, AHEAD = 40_000, 256, 240
DELAY, FINE = 17, 10  # a step of the series is ten steps of the integration


def solve(steps: int) -> np.ndarray:
    """Returns the series after a transient, by Euler's method."""
    x = np.full((steps + 1000) * FINE, 1.2)
    for t in range(DELAY * FINE, len(x) - 1):
        late = x[t - DELAY * FINE]
        x[t + 1] = x[t] + (0.2 * late / (1 + late**10) - 0.1 * x[t]) / FINE
    return x[1000 * FINE :: FINE]


def quantise(x: np.ndarray) -> np.ndarray:
    """Returns numbers from 0 to LEVELS - 1."""
    level = np.rint((x - LOW) / (HIGH - LOW) * (LEVELS - 1))
    return np.clip(level, 0, LEVELS - 1).astype(np.uint8)


def draw(samples: Path, picture: Path) -> dict[str, Any]:
    """Draws the truth and the samples, [samples, tokens], after the prompt."""
    try:
        rows = np.atleast_2d(np.load(samples, mmap_mode="r"))  # not of a claimed size
        if rows.ndim != 2 or rows.shape[1] < CONTEXT + AHEAD:
            raise ValueError(f"it has the shape {rows.shape}")
        rows = rows.astype(np.int64)
    except (ValueError, EOFError, OverflowError) as error:
        raise UserError(
            f"--samples={samples} is not a .npy file of samples, each of at least "
            f"{CONTEXT + AHEAD} numbers with the prompt"
        ) from error
    numbers = quantise(solve(TRAINED + CONTEXT + AHEAD))[TRAINED:]
    figure = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    ahead = np.arange(AHEAD)
    for row in rows:
        axes.plot(ahead, row[CONTEXT:][:AHEAD], color="C1", alpha=0.4, lw=1)
    axes.plot(np.arange(-60, AHEAD), numbers[CONTEXT - 60 :][: AHEAD + 60], "k", lw=1.5)
    axes.axvline(0, color="gray", lw=1)
    axes.set(xlabel="steps after the prompt", ylabel="level")
    figure.savefig(picture, dpi=120)
    return {"samples": len(rows), "picture": str(picture)}


def write() -> dict[str, Any]:
    """Writes series.npy and context.txt."""
    numbers = quantise(solve(TRAINED + CONTEXT))
    np.save("series.npy", numbers[:TRAINED])
    Path("context.txt").write_text(" ".join(map(str, numbers[TRAINED:][:CONTEXT])))
    return {"series": "series.npy", "context": "context.txt"}


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("action", choices=("write", "draw"))
    parser.add_argument("--samples", type=program.path, default=Path("sample.npy"))
    parser.add_argument("--picture", type=program.picture, default=Path("series.png"))

    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return write() if args.action == "write" else draw(args.samples, args.picture)

    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
