"""The table of memories as a page, a picture and JSON."""

import dataclasses
import statistics
from pathlib import Path

import numpy as np

from txl_jax.paper.comparison import Measured, measure
from txl_jax.paper.memory_rows import MEMORIES, base
from txl_jax.paper.options import TableConfig
from txl_jax.paper.table import describe_origin
from txl_jax.report.log import Json, say
from txl_jax.report.plots import empty, save
from txl_jax.workdir.staging import write_files

HEAD = (
    "kind | parameters | state, KiB | tokens/s | step, MiB | nats | accuracy or "
    "identifiers | verdict"
)
LEAST = 0.001  # nats; a smaller difference is none, however small its spread


def write(table: TableConfig, workdir: Path, cells: list[Json], origin: Json) -> Json:
    """Writes the table's files, and returns its JSON."""
    rows = summarize(cells)
    text = f"# Memories\n\n{describe_origin(origin)}\n{markdown(rows, table.seeds)}"
    result = {**dataclasses.asdict(table), **origin, "rows_by_task": rows}
    result |= {"cells": cells, "workdir": str(workdir)}

    def draw(_: Json, path: Path) -> None:
        plot(rows, path)
        path.with_suffix(".md").write_text(text, "utf-8")

    say(text)
    return result | write_files(workdir / MEMORIES, result, draw)


def summarize(cells: list[Json]) -> dict[str, dict[str, Json]]:
    """Returns each task's rows by kind: means over the seeds, and a verdict."""
    groups: dict[str, dict[str, list[Json]]] = {}
    for cell in cells:
        groups.setdefault(cell["task"], {}).setdefault(cell["kind"], []).append(cell)
    return {
        task: {kind: row(kind, kinds) for kind in kinds}
        for task, kinds in groups.items()
    }


def row(kind: str, kinds: dict[str, list[Json]]) -> Json:
    """Returns a kind's figures on one task, and a verdict if its base is there."""
    runs, other = kinds[kind], base(kind)
    means = {
        name: statistics.fmean(run[name] for run in runs)
        for name in ("accuracy", "identifier_loss", "tokens_per_second")
        if runs[0].get(name) is not None
    }
    same = {x: runs[0][x] for x in ("parameters", "state_bytes", "train_step_bytes")}
    nlls = [run["nll"] for run in runs]
    found: Json = {**same, **means, "nll": measure(nlls)._asdict()}
    if other != kind and other in kinds:
        pairs = zip(nlls, (run["nll"] for run in kinds[other]), strict=True)
        found |= {"verdict": judge([x - y for x, y in pairs]), "compared_with": other}
    return found


def judge(differences: list[float]) -> str:
    """Returns whether the mean difference exceeds the spread over seeds, and LEAST."""
    cost = measure(differences)
    if len(differences) < 3:
        return "no verdict: fewer than 3 seeds"
    if abs(cost.mean) <= max(cost.spread, LEAST):
        return "no difference"
    return "better" if cost.mean < 0 else "worse"


def markdown(rows: dict[str, dict[str, Json]], seeds: int) -> str:
    """Returns a table for each task; nats are the mean, least and most of all seeds."""
    lines = []
    for task, kinds in rows.items():
        lines += [f"\n## {task}, {seeds} seeds\n", f"| {HEAD} |", "|---" * 8 + "|"]
        for kind, each in kinds.items():
            nll = Measured(**each["nll"])
            more = each.get("accuracy", each.get("identifier_loss"))
            cells = [
                kind,
                f"{each['parameters']:,}",
                f"{each['state_bytes'] / 2**10:,.1f}",
                f"{each['tokens_per_second']:,.0f}",
                f"{each['train_step_bytes'] / 2**20:,.1f}",
                f"{nll.mean:.4f} ({nll.least:.4f}–{nll.most:.4f})",
                "–" if more is None else f"{more:.3f}",
                verdict(each),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdict(row: Json) -> str:
    """Formats a row's verdict, such as "better than `paper`"."""
    if "verdict" not in row:
        return "–"
    words = {"better": "better than", "worse": "worse than"}.get(row["verdict"])
    return f"{words} `{row['compared_with']}`" if words else row["verdict"]


def plot(rows: dict[str, dict[str, Json]], path: Path) -> None:
    """Draws the nats of each kind, mean and range over the seeds, task by task."""
    columns = min(len(rows), 3)
    lines = -(-len(rows) // columns)
    figure = empty(3.2 * columns, 3.2 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes in panels[len(rows) :]:
        axes.set_axis_off()
    for axes, (task, kinds) in zip(panels, rows.items(), strict=False):
        nlls = [Measured(**each["nll"]) for each in kinds.values()]
        y = np.arange(len(kinds))
        mean, *ends = np.array(nlls).T
        axes.plot(ends, [y, y], "|-", color="tab:blue")
        axes.plot(mean, y, "o", color="tab:blue")
        axes.set_yticks(y, list(kinds), fontsize=8)
        axes.invert_yaxis()
        axes.set(title=task, xlabel="nats")
    save(figure, path)
