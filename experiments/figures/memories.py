"""Right answers by distance in the table of memories: a figure.

    python -m experiments.figures.memories [--workdirs=runs/memories ...]

Adds the finished runs of tables of memories to the committed table, and draws right
answers in recall. The table's rows may thus come from several workdirs; each run that
was added names its revisions. Prints one JSON line.
"""

import argparse
import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes

from txl_jax import config as configs
from txl_jax.model.config import ModelConfig
from txl_jax.paper import memory_table
from txl_jax.paper.options import KINDS, TASKS
from txl_jax.paper.table import describe_runs
from txl_jax.report.log import to_json
from txl_jax.runtime.storage import refusing_damage, write_atomically

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


def find_cells(workdir: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yields the finished runs of a table, as cells, and their workdirs."""
    first_seed = configs.default().train.seed
    for path in sorted(workdir.glob("*/*/seed_*/*.json")):
        folder, kind = path.parent, path.stem
        if kind in KINDS and folder.parent.name == memory_table.trained_as(kind):
            with refusing_damage(path):
                saved = json.loads(path.read_text("utf-8"))
                seed = saved["asked"]["train"]["seed"] - first_seed
                task = folder.parents[1].name
                cell = {"task": task, "kind": kind, "seed": seed, **saved["found"]}
            yield cell, folder


def add(table: dict[str, Any], workdirs: list[Path]) -> int:
    """Adds the runs that a table lacks, and returns their number."""

    def place(cell: dict[str, Any]) -> tuple[int, int, int]:
        kind = [*KINDS].index(cell["kind"])
        return [*TASKS].index(cell["task"]), kind, cell["seed"]

    cells = {place(cell): cell for cell in table["cells"]}
    before = len(cells)
    for cell, folder in (found for each in workdirs for found in find_cells(each)):
        if place(cell) in cells:
            continue
        origin = describe_runs([folder])
        cells[place(cell)] = cell | {"git_revisions": origin["git_revisions"]}
        table["hours"] += origin.pop("hours")
        for name, values in origin.items():
            table[name] = sorted({*table[name], *values})
    table["cells"] = [cells[key] for key in sorted(cells)]
    table["rows_by_task"] = memory_table.summarize(table["cells"])
    return len(cells) - before


def plot(table: dict[str, Any], path: Path) -> None:
    """Draws right answers against distance, a panel for each task."""
    figure = matplotlib.figure.Figure(figsize=(8, 3.6), layout="constrained")
    tasks = [task for task in TITLES if task in table["rows_by_task"]]
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False).flat
    for axes, task in zip(panels, tasks, strict=True):
        cells = [cell for cell in table["cells"] if cell["task"] == task]
        plot_task(axes, task, cells)
    panels[0].set(ylabel="right answers, %")
    panels[0].legend(
        fontsize=8, loc="center", bbox_to_anchor=(0.57, 0.55), reverse=True
    )
    figure.savefig(path, dpi=120)


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
    parser.add_argument("--workdirs", type=program.path, nargs="+", default=[])
    parser.add_argument("--table", type=program.path, default=TABLE)
    parser.add_argument("--picture", type=program.picture, default=PICTURE)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns how many runs were added; writes the table and the picture."""
    text = args.table.read_text("utf-8")
    with refusing_damage(args.table):
        table = json.loads(text)
        added = add(table, args.workdirs)
    write_atomically(args.table, f"{to_json(table, indent=2)}\n".encode())
    plot(table, args.picture)
    found = collections.Counter((x["task"], x["kind"]) for x in table["cells"])
    few = (" ".join(row) for row, seeds in found.items() if seeds < table["seeds"])
    return {
        "program": "memories",
        "added": added,
        "cells": len(table["cells"]),
        "rows_with_too_few_seeds": [*few],
        "picture": str(args.picture),
    }


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
