"""The mode `table` for kinds of memory: each learns each task with several seeds.

Every run has a subfolder of the table's workdir and is scored once, so the same command
resumes an interrupted table.

Dims: B streams, L segment, T tokens of a text.
"""

import dataclasses
import math
import statistics
from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes

from txl_jax.config import Config, with_values
from txl_jax.config import load as load_experiment
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.fields import Values
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.paper import comparison
from txl_jax.paper.comparison import Measured
from txl_jax.paper.options import (
    COMMON,
    KINDS,
    MEMORIES,
    TASKS,
    MemoryTask,
    TableConfig,
    base,
)
from txl_jax.paper.table import (
    ASKED,
    describe_origin,
    describe_runs,
    finish,
    train_once,
)
from txl_jax.paper.tasks import TEXTS, Copying, count_answers
from txl_jax.report.log import say
from txl_jax.report.metrics_log import spent_seconds
from txl_jax.report.plots import empty, save
from txl_jax.report.progress import Progress
from txl_jax.runtime.programs import user_cache
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.train import Run
from txl_jax.update.state import parameter_count
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.load import Loaded, load
from txl_jax.workdir.staging import write_files

HEAD = "kind | parameters | state, KiB | tokens/s | nats | accuracy | verdict"
RESULT = "scores.json"  # in a run's workdir
LEAST = 0.001  # nats; a smaller difference is none, whatever its spread


def compare_memories(table: TableConfig, workdir: Path, overrides: Values) -> Json:
    """Makes the table like `ablate`; writes memories.md, .json and .png."""
    cells, folders = [], []
    for task in [name for name in table.rows if name in TASKS] or TASKS:
        for kind in [name for name in table.rows if name in KINDS] or KINDS:
            for number in range(table.seeds):
                row = row_config(task, kind, overrides, number)
                folder = workdir / task / kind / f"seed_{row.train.seed}"
                cell = run_cell(task, row, folder)
                cells.append({"task": task, "kind": kind, "seed": number, **cell})
                folders.append(folder)
    return write(table, workdir, cells, describe_runs(folders))


def row_config(task: str, kind: str, overrides: Values, number: int) -> Config:
    """Returns the config of a task's run with a kind of memory; writes the text."""
    recipe = TASKS[task]
    values = {"eval.baselines": False, **COMMON, **recipe.values, **KINDS[kind]}
    if recipe.text:
        text = make_text(recipe)
        values["data.path"] = str(text.write(user_cache() / "tasks"))
    config = with_values(load_experiment(recipe.recipe), values)
    return finish(config, overrides, number, most_warmup=100)


def run_cell(task: str, row: Config, folder: Path) -> Json:
    """Returns the figures of one run, from its workdir if it is finished."""

    def measure(run: Run) -> Json:
        loaded, text_T = load(folder, row), run.tokens.split("test")
        return score(TASKS[task], loaded, text_T) | costs(loaded, row, folder)

    result = train_once(row, folder / RESULT, measure)
    return {name: x for name, x in result.items() if name != ASKED}


def score(task: MemoryTask, loaded: Loaded, text_T: np.ndarray) -> Json:
    """Returns the loss in nats, and the share of right answers if the task has any."""
    options = loaded.config.eval
    if not task.text:
        evaluate = make_evaluate(loaded.model.config, options, loaded.mesh)
        with Progress("test") as progress:
            result = evaluate(loaded.params, text_T, progress)
        return {"nll": result["nll"], "scored": result["tokens"]}
    counts = count_answers(loaded, options.cut(text_T))
    scores = {"nll": counts["nll_nats"], "scored": counts["answers"]}
    scores["accuracy"] = counts["accuracy"]
    if task.distances:
        scores["accuracies"] = {
            str(distance): count_answers(loaded, far_text(task, distance))["accuracy"]
            for distance in task.distances
        }
    return scores


def far_text(task: MemoryTask, distance: int) -> np.ndarray:
    """Returns a text of the task's kind with answers from `distance` tokens back."""
    text = make_text(task)
    delay = text.delay + distance - text.distance
    return np.frombuffer(dataclasses.replace(text, delay=delay).text("test"), np.uint8)


def make_text(task: MemoryTask) -> Copying:
    """Returns the generated text of a task."""
    assert task.text
    kind, *sizes = task.text
    return TEXTS[kind](*sizes)


def costs(loaded: Loaded, row: Config, folder: Path) -> Json:
    """Returns the parameters, the bytes of state and the speed of the training."""
    train = row.train
    segments = train.num_steps * train.segments_per_update
    tokens = segments * train.batch_size * train.tgt_len
    return {
        "parameters": parameter_count(loaded.params),
        "state_bytes": state_bytes(loaded.config.model),
        "train_tokens": tokens,
        "tokens_per_second": tokens / spent_seconds(folder / METRICS)["update"],
    }


def state_bytes(model: ModelConfig) -> int:
    """Returns the bytes that a stream keeps between segments."""
    memory = jax.eval_shape(lambda: Memory.empty(model, 1))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(memory))


def write(table: TableConfig, workdir: Path, cells: list[Json], origin: Json) -> Json:
    """Writes the table's files, and returns its JSON."""
    rows = summarize(cells)
    text = f"# Memories\n\n{describe_origin(origin)}\n{markdown(rows, table.seeds)}"
    result = {**dataclasses.asdict(table), **origin, "rows_by_task": rows}
    result |= {"cells": cells, "workdir": str(workdir)}

    def draw(_: Json, path: Path) -> None:
        plot(cells, path)
        write_atomically(path.with_suffix(".md"), text)

    say(text)
    return result | write_files(workdir / MEMORIES, result, draw)


def summarize(cells: list[Json]) -> dict[str, dict[str, Json]]:
    """Returns each task's rows by kind: means over the seeds, and a verdict."""
    groups: dict[str, dict[str, list[Json]]] = {}
    for cell in cells:
        groups.setdefault(cell["task"], {}).setdefault(cell["kind"], []).append(cell)
    return {
        task: {kind: summarize_kind(kind, kinds) for kind in kinds}
        for task, kinds in groups.items()
    }


def summarize_kind(kind: str, kinds: dict[str, list[Json]]) -> Json:
    """Returns a kind's figures on one task, and a verdict if its base is there."""
    runs, other = kinds[kind], base(kind)
    row: Json = {x: runs[0][x] for x in ("parameters", "state_bytes")}
    for name in {"accuracy", "tokens_per_second"} & runs[0].keys():
        row[name] = statistics.fmean(run[name] for run in runs)
    row["nll"] = comparison.measure([run["nll"] for run in runs])._asdict()
    if other != kind and other in kinds:
        base_nlls = {run["seed"]: run["nll"] for run in kinds[other]}
        seeds = [run for run in runs if run["seed"] in base_nlls]
        differences = [run["nll"] - base_nlls[run["seed"]] for run in seeds]
        row |= {"verdict": judge(differences), "compared_with": other}
    return row


def judge(differences: list[float]) -> str:
    """Returns whether the mean difference exceeds the spread over seeds, and LEAST."""
    if len(differences) < 3:
        return "no verdict: fewer than 3 seeds"
    cost = comparison.measure(differences)
    if abs(cost.mean) <= max(cost.spread, LEAST):
        return "no difference"
    return "better" if cost.mean < 0 else "worse"


def markdown(rows: dict[str, dict[str, Json]], seeds: int) -> str:
    """Returns a table for each task; nats are the mean, least and most of all seeds."""
    lines = []
    for task, kinds in rows.items():
        columns = HEAD.count("|") + 1
        lines += [f"\n## {task}, {seeds} seeds\n", f"| {HEAD} |"]
        lines.append("|---" * columns + "|")
        for kind, row in kinds.items():
            nll = Measured(**row["nll"])
            cells = [
                kind,
                f"{row['parameters']:,}",
                f"{row['state_bytes'] / 2**10:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{nll.mean:.4f} ({nll.least:.4f}–{nll.most:.4f})",
                f"{row['accuracy']:.3f}" if "accuracy" in row else "–",
                verdict(row),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdict(row: Json) -> str:
    """Formats a row's verdict, such as "better than `paper`"."""
    if "verdict" not in row:
        return "–"
    words = {"better": "better than", "worse": "worse than"}.get(row["verdict"])
    return f"{words} `{row['compared_with']}`" if words else row["verdict"]


def plot(cells: list[Json], path: Path) -> None:
    """Draws each kind's mean and range over the seeds, task by task.

    The range is of nats or, where answers at several distances are counted, of the
    share of right ones by distance.
    """
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    columns = min(len(tasks), 3)
    lines = -(-len(tasks) // columns)
    figure = empty(3.2 * columns, 3.2 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(panels, tasks, strict=False):
        kinds: dict[str, list[Json]] = {}
        for cell in cells:
            if cell["task"] == task:
                kinds.setdefault(cell["kind"], []).append(cell)
        draw = plot_distances if TASKS[task].distances else plot_nats
        draw(axes, kinds)
        axes.set_title(task)
    save(figure, path)


def plot_nats(axes: Axes, kinds: dict[str, list[Json]]) -> None:
    """Draws the nats of each kind's runs."""
    y = np.arange(len(kinds))
    nlls = [comparison.measure([run["nll"] for run in runs]) for runs in kinds.values()]
    mean, *ends = np.array(nlls).T
    axes.plot(ends, [y, y], "|-", color="tab:blue")
    axes.plot(mean, y, "o", color="tab:blue")
    axes.set_yticks(y, list(kinds), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="nats")


def plot_distances(axes: Axes, kinds: dict[str, list[Json]]) -> None:
    """Draws the share of right answers of each kind's runs, by distance."""
    for kind, runs in kinds.items():
        x = [int(distance) for distance in runs[0]["accuracies"]]
        share_SX = np.array([[*run["accuracies"].values()] for run in runs])
        (line,) = axes.plot(x, share_SX.mean(0), "o-", label=kind, markersize=3)
        axes.fill_between(
            x, share_SX.min(0), share_SX.max(0), color=line.get_color(), alpha=0.2
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="distance of the answer, in tokens", ylabel="right answers")
    axes.legend(fontsize=7)
