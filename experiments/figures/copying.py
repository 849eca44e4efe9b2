"""How far back a model learns to copy, and how far back it could: a figure.

    python -m txl_jax.experiments.figures.copying [--delays 8 24 56 --mem_lens 0 16 64]
    python -m txl_jax.experiments.figures.copying --mem_lens 16 \\
        --gradient_segments 1 2 4 8
    python -m txl_jax.experiments.figures.copying --recall 2 --gradient_segments 1 4 \\
        --mem_lens 16 --n_layer 4 --updates 2000 --workdir=runs/figures/recall

Trains the experiment `copying`, or its model on associative recall, for each delay,
memory, number of segments that a gradient crosses, and seed, and counts the letters
that the model repeats correctly. All models make equally many updates of equally many
tokens. Every cell has its own workdir and result, with its provenance and the seconds
of its last start, so the same command resumes after a kill. Prints one JSON line and
writes copying.json and copying.png.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes

from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.paper.tasks import PATTERN, Copying, Recall, count_answers
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.runtime.storage import write_atomically
from txl_jax.train import plan
from txl_jax.workdir import load
from txl_jax.workdir.results import cached

from . import program
from .reach import farthest

EXPERIMENT = Path(__file__).parents[1] / "copying.py"
RESULT = "accuracy.json"
# Distances that the plot draws as bars, and their styles.
BARS: dict[str, dict[str, Any]] = {
    "seen_by_all_tokens": {"linewidth": 5, "solid_capstyle": "butt"},
    "seen_by_last_tokens": {"linewidth": 2},
    "reach_tokens": {"linewidth": 2, "linestyle": ":"},
}
# Of the models, from the shortest memory or gradient (Okabe and Ito 2008).
COLORS = "black", "#E69F00", "#D55E00", "#CC79A7"
LENGTH, SYMBOLS = 8, 8  # letters of a pattern, and letters to choose from


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = program.make_parser(__doc__)
    delays = [4, 8, 16, 24, 32, 40, 56]
    parser.add_argument("--delays", type=program.count, nargs="+", default=delays)
    parser.add_argument("--mem_lens", type=int, nargs="+", default=[0, 16, 32, 64])
    parser.add_argument(
        "--gradient_segments", type=program.count, nargs="+", default=[1]
    )
    pairs, text = range(len(PATTERN) + 1), "recall of so many pairs"
    parser.add_argument("--recall", type=int, choices=pairs, default=0, help=text)
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--updates", type=program.count, default=400)
    text = "streams in an update, times the segments that a gradient crosses"
    parser.add_argument("--batch_size", type=int, default=32, help=text)
    default = Path("runs/figures/copying")
    parser.add_argument("--workdir", type=program.path, default=default)
    parser.add_argument("--data_dir", default="", help="as data.data_dir")
    return parser


def make_task(args: argparse.Namespace, cell: dict[str, int]) -> Copying:
    """Returns the task of a cell."""
    if args.recall:
        return Recall(cell["delay"], args.recall, SYMBOLS)
    return Copying(cell["delay"], LENGTH, SYMBOLS)


def make_config(args: argparse.Namespace, cell: dict[str, int], path: Path) -> Config:
    """Returns the config of a cell: the experiment's with its sizes and text."""
    G = cell["gradient_segments"]
    values = {
        **{"data.path": str(path), "data.data_dir": args.data_dir},
        **{"train.seed": cell["seed"], "train.batch_size": args.batch_size // G},
        **{"train.num_steps": args.updates, "train.eval_every": args.updates},
        **{"model.n_layer": args.n_layer, "model.unroll": args.n_layer},
        **{f"{x}.mem_len": cell["mem_len"] for x in ("model", "eval", "generate")},
    }
    if G > 1:
        parts = ("segments_per_call", "segments_per_update", "gradient_segments")
        values |= {f"train.{part}": G for part in parts}
    return configs.with_values(configs.load(str(EXPERIMENT)), values)


def run_cell(args: argparse.Namespace, cell: dict[str, int]) -> dict[str, Any]:
    """Returns a cell's result, trained and counted unless that is on disk."""
    task = make_task(args, cell)
    config = make_config(args, cell, task.write(args.workdir / "tasks"))
    name = "-".join(f"{key}={value}" for key, value in cell.items())
    setting = f"recall={args.recall}-" * bool(args.recall) + f"layers={args.n_layer}"
    size = f"batch_size={args.batch_size}-updates={args.updates}"
    folder = args.workdir / f"{setting}-{name}-{size}"

    def measure() -> dict[str, Any]:
        say(f"copying: {folder}")
        started = time.perf_counter()
        counts = train_and_count(config, folder)
        seconds = time.perf_counter() - started
        origin = {"seconds": seconds, "provenance": provenance.describe_result()}
        return {**describe(config, task), **counts, **origin}

    return cached(folder / RESULT, cell, measure)


def train_and_count(config: Config, folder: Path) -> dict[str, Any]:
    """Trains the cell, resuming after a kill, and counts its right answers."""
    with plan(config, folder) as run:
        run.train()
        return count_answers(load.load(folder), run.tokens.split("test"))


def describe(config: Config, task: Copying) -> dict[str, int]:
    """Returns the distance of a cell's answers and its model's reach, in tokens."""
    tgt_len = config.train.tgt_len
    return {
        "distance_tokens": task.distance,
        "tgt_len": tgt_len,
        "seen_by_all_tokens": config.model.mem_len,
        "seen_by_last_tokens": farthest(config.model, tgt_len, 1),
        "reach_tokens": farthest(config.model, tgt_len),
    }


def plot(cells: list[dict[str, Any]], chance: float, path: Path) -> None:
    """Draws accuracy against distance, and how far the memory reaches."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    distances = sorted({cell["distance_tokens"] for cell in cells})
    pairs = sorted({(cell["mem_len"], cell["gradient_segments"]) for cell in cells})
    by_memory = len({mem_len for mem_len, _ in pairs}) > 1
    for number, (mem_len, G) in enumerate(pairs):
        row = [
            cell
            for cell in cells
            if (cell["mem_len"], cell["gradient_segments"]) == (mem_len, G)
        ]
        by_distance: dict[int, list[float]] = {}
        for cell in row:
            percent = 100 * cell["accuracy"]
            by_distance.setdefault(cell["distance_tokens"], []).append(percent)
        x = sorted(by_distance)
        mean, low, high = (
            np.array([of(by_distance[distance]) for distance in x])
            for of in (np.mean, min, max)
        )
        color = COLORS[(number if by_memory else G.bit_length() - 1) % len(COLORS)]
        label = f"memory {mem_len}" if by_memory else describe_gradient(G)
        # Where lines coincide, the later ones are thinner, so that all are seen.
        width = 1 + 0.8 * (len(pairs) - number)
        (line,) = axes.plot(x, mean, "o-", color=color, label=label)
        line.set(linewidth=width, markersize=2 + width)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        if by_memory:
            height, start = 105 + 4 * number, 1
            for name, style in BARS.items():
                axes.plot([start, row[0][name]], [height, height], color=color, **style)
                start = row[0][name]
    if by_memory:
        title = (
            "above: seen by every token of a segment (thick), by its last token "
            "(thin), reached by all layers (dotted)"
        )
        axes.set_title(title, fontsize=9)
    else:
        mark_reach(axes, cells[0])
    axes.axhline(100 * chance, color="gray", linestyle="--", linewidth=1)
    axes.annotate("chance", (0.005, 100 * chance), xycoords=("axes fraction", "data"),
                  ha="left", va="top", fontsize=8, color="gray")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, list(map(str, distances)))
    axes.set(
        xlabel="distance of the answer, in tokens",
        ylabel="right answers, %",
        xlim=(0.92 * min(distances), 1.12 * max(distances)),
        ylim=(0, 104 + 4 * len(pairs) if by_memory else 112),
        yticks=range(0, 101, 20),
    )
    axes.legend(fontsize=8, loc="center right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def describe_gradient(G: int) -> str:
    """Returns the label of models whose gradients cross G segments."""
    return f"gradients across {G} segments" if G > 1 else "the paper's training"


def mark_reach(axes: Axes, cell: dict[str, Any]) -> None:
    """Marks the oldest token that a query sees, and how far the layers reach."""
    seen, end = cell["seen_by_last_tokens"], cell["reach_tokens"]
    first = end - (cell["tgt_len"] - 1)  # for a segment's first token
    axes.axvspan(first, end, color="gray", alpha=0.2, linewidth=0)
    axes.axvline(seen, color="gray", linewidth=1)
    for text, x in ("seen directly", seen), ("reach of the layers", first):
        axes.annotate(text, (x, 1.0), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(-4, -4), textcoords="offset points",
                      ha="right", va="top")  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of all cells; writes it, and the picture."""
    grid = [
        {"delay": delay, "mem_len": mem_len, "gradient_segments": G, "seed": seed}
        for seed in args.seeds
        for delay in args.delays
        for mem_len in args.mem_lens
        for G in args.gradient_segments
    ]
    cells = [run_cell(args, cell) for cell in grid]
    picture = args.workdir / "copying.png"
    plot(cells, 1 / SYMBOLS, picture)
    result = {
        "program": "copying",
        "chance": 1 / SYMBOLS,
        "updates": args.updates,
        "batch_size": args.batch_size,
        "n_layer": args.n_layer,
        "recall_pairs": args.recall,
        "cells": cells,
        "picture": str(picture),
    }
    write_atomically(args.workdir / "copying.json", json.dumps(result) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
