"""Right answers by distance in the table of memories: a figure.

    python -m experiments.figures.memories [--table=runs/memories/memories.json]

Draws right answers in recall from a table of memories, by default the committed one,
which also has kinds that can no longer be trained. Prints one JSON line.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from txl_jax.model.config import ModelConfig
from txl_jax.paper.options import TASKS
from txl_jax.runtime.storage import refusing_damage

from . import program
from .reach import farthest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "experiments/logs/memories.json"
PICTURE = ROOT / "docs/pictures/recall_distances.png"
# Colors that differ for every reader (Okabe and Ito 2008), and markers.
STYLES = {
    "fast_weights": ("#0072B2", "o", "fast weights"),
    "gradients": ("#D55E00", "s", "gradients across 4 segments"),
    "retrieval": ("#009E73", "^", "retrieval from 1,024 tokens"),
    "paper": ("#000000", "D", "the paper's memory"),
}
TITLES = {
    "recall_96": "recall: 2 pairs",
    "multi_query_96": "multi-query recall: 8 pairs",
}


def plot(table: dict[str, Any]) -> Figure:
    """Returns right answers against distance, a panel for each task."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    tasks = [task for task in TITLES if task in table["rows_by_task"]]
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False).flat
    for axes, task in zip(panels, tasks, strict=True):
        cells = [cell for cell in table["cells"] if cell["task"] == task]
        plot_task(axes, task, cells)
    panels[0].set(ylabel="right answers, %")
    panels[0].legend(
        fontsize=8, loc="center", bbox_to_anchor=(0.57, 0.55), reverse=True
    )
    return figure


def plot_task(axes: Axes, task: str, cells: list[dict[str, Any]]) -> None:
    """Draws each kind's mean and range over the seeds, chance and the reach."""
    recipe = TASKS[task]
    assert recipe.text
    mark_reach(axes, task)
    chance = 100 / recipe.text[-1]
    axes.axhline(chance, color="gray", linestyle="--", linewidth=1)
    axes.annotate("chance", (46, chance), (0, -3), textcoords="offset points",
                  ha="left", va="top", fontsize=8, color="dimgray")  # fmt: skip
    for kind, (color, marker, label) in reversed(STYLES.items()):
        runs = [cell["accuracies"] for cell in cells if cell["kind"] == kind]
        if runs:
            x = [int(distance) for distance in runs[0]]
            y = 100 * np.array([[*run.values()] for run in runs])
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.2, lw=0)
            axes.plot(x, y.mean(0), color=color, marker=marker, label=label, ms=4.5)
    axes.set_xscale("log", base=2)
    labels = [f"{x}\ntrained" if x == 96 else f"{x}" for x in recipe.distances]
    axes.set_xticks(recipe.distances, labels)
    axes.minorticks_off()
    axes.set(xlabel="distance of the answer, in tokens", ylim=(0, 104))
    axes.set_title(TITLES[task], fontsize=10)
    axes.grid(alpha=0.25)


def mark_reach(axes: Axes, task: str) -> None:
    """Marks the reach of the layers, from a segment's first token to its last."""
    values = TASKS[task].values
    sizes = {name: values[f"model.{name}"] for name in ("n_layer", "mem_len")}
    tgt_len = values["train.tgt_len"]
    end = farthest(ModelConfig(vocab_size=256, **sizes), tgt_len)
    axes.axvspan(end - (tgt_len - 1), end, color="gray", alpha=0.25, linewidth=0)
    axes.annotate("reach of\nthe layers", (end - tgt_len / 2, 52), fontsize=8,
                  ha="center", va="center", rotation=90, color="dimgray")  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = program.make_parser(__doc__)
    parser.add_argument("--table", type=program.path, default=TABLE)
    parser.add_argument("--picture", type=program.picture, default=PICTURE)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the number of runs in the table; writes the picture."""
    text = args.table.read_text("utf-8")
    with refusing_damage(args.table):
        table = json.loads(text)
        figure = plot(table)
    figure.savefig(args.picture, dpi=120)
    cells = len(table["cells"])
    return {"program": "memories", "cells": cells, "picture": str(args.picture)}


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
