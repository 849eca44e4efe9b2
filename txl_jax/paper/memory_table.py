"""The mode `table` for kinds of memory: each learns each task with several seeds.

Every run has a subfolder of the table's workdir and is scored once, so the same command
resumes an interrupted table.

Dims: B streams, L segment, T tokens of a text.
"""

import dataclasses
import keyword
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.aot.lower import compile_step_for
from txl_jax.config import Config, with_values
from txl_jax.config import load as load_experiment
from txl_jax.data.byte_ranges import size
from txl_jax.data.files import split_stdlib
from txl_jax.data.streams import Streams
from txl_jax.evaluate import continuous_cache, reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.fields import Values
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.segment import OneSegment
from txl_jax.model.txl import TransformerXL
from txl_jax.paper import comparison
from txl_jax.paper.comparison import Measured
from txl_jax.paper.options import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    COMMON,
    KINDS,
    MEMORIES,
    TASKS,
    TUNED_ON,
    TableConfig,
    base,
)
from txl_jax.paper.table import (
    Train,
    TrainedRun,
    describe_origin,
    describe_runs,
    finish,
    keep,
)
from txl_jax.paper.tasks import FIRST_ANSWER, TEXTS
from txl_jax.report.log import say, spent_seconds
from txl_jax.report.plots import empty, save
from txl_jax.runtime.programs import Program, user_cache
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.update.state import abstract_segments
from txl_jax.update.step import make_updater
from txl_jax.workdir import run_record
from txl_jax.workdir.folder import METRICS
from txl_jax.workdir.load import Loaded, load
from txl_jax.workdir.staging import write_files

HEAD = (
    "kind | parameters | state, KiB | tokens/s | step, MiB | nats | accuracy or "
    "identifiers | verdict"
)
LEAST = 0.001  # nats; a smaller difference is none, whatever its spread


def compare_memories(
    table: TableConfig, workdir: Path, overrides: Values, train: Train
) -> Json:
    """Makes the table like `ablate`; writes memories.md, .json and .png."""
    cells, folders = [], []
    for task in [name for name in table.rows if name in TASKS] or TASKS:
        for kind in [name for name in table.rows if name in KINDS] or KINDS:
            for number in range(table.seeds):
                row = row_config(task, kind, overrides, number)
                folder = workdir / task / trained_as(kind) / f"seed_{row.train.seed}"
                cell = run_cell(task, kind, row, folder, train)
                cells.append({"task": task, "kind": kind, "seed": number, **cell})
                folders.append(folder)
    return write(table, workdir, cells, describe_runs(sorted(set(folders))))


def row_config(task: str, kind: str, overrides: Values, number: int) -> Config:
    """Returns the config of a task's run with a kind of memory; writes the text."""
    recipe = TASKS[task]
    values = {"eval.baselines": False, **COMMON, **recipe.values, **KINDS[kind]}
    if recipe.text:
        text_kind, *sizes = recipe.text
        text = TEXTS[text_kind](*sizes)
        values["data.path"] = str(text.write(user_cache() / "tasks"))
    config = with_values(load_experiment(recipe.recipe), values)
    return finish(config, overrides, number, most_warmup=100)


def trained_as(kind: str) -> str:
    """Returns the first kind with the same training."""

    def training(name: str) -> list[tuple[str, object]]:
        fields = KINDS[name].items()
        return [(field, x) for field, x in fields if not field.startswith("eval.")]

    return next(name for name in KINDS if training(name) == training(kind))


def run_cell(task: str, kind: str, row: Config, folder: Path, train: Train) -> Json:
    """Returns the figures of one run, from its workdir if it is finished."""

    def found(run: TrainedRun) -> Json:
        return {"found": measure(task, row, folder, run)}

    cell: Json = keep(row, folder / f"{kind}.json", train, found)["found"]
    return cell


def measure(task: str, row: Config, folder: Path, done: TrainedRun) -> Json:
    """Returns a run's costs and losses, in nats, on the test split or its answers."""
    loaded, options = load(folder, row), row.eval
    answers = TASKS[task].text is not None
    if options.cache_len:
        tokens = done.tokens.split("valid")[:TUNED_ON]
        options = tune(loaded, options, tokens, answers)
    text = options.cut(done.tokens.split("test"))
    nll_T, right_T = score_tokens(loaded, options, text, answers)
    scored_T = find_scored(text, answers)
    found: Json = {"nll": float(nll_T[scored_T].mean()), "scored": int(scored_T.sum())}
    if right_T is not None:
        found["accuracy"] = float(right_T[scored_T].mean())
    if TASKS[task].distances:
        found["accuracies"] = far_accuracies(task, loaded, options)
    if task == "stdlib":
        found |= identifier_loss(nll_T, text)
    if options.cache_len:
        found["cache_weight"] = options.cache_weight
        found["cache_theta"] = options.cache_theta
    return found | costs(loaded, row, folder)


def far_accuracies(task: str, loaded: Loaded, options: EvalConfig) -> dict[str, float]:
    """Returns the share of right answers by distance, in texts of the task's kind."""
    recipe, found = TASKS[task], {}
    assert recipe.text
    kind, *sizes = recipe.text
    text = TEXTS[kind](*sizes)
    for distance in recipe.distances:
        delay = text.delay + distance - text.distance
        far = dataclasses.replace(text, delay=delay).text("test")
        far_T = np.frombuffer(far, np.uint8)
        _, right_T = score_tokens(loaded, options, far_T, answers=True)
        assert right_T is not None
        found[str(distance)] = float(right_T[find_scored(far_T, answers=True)].mean())
    return found


@reader.from_hidden
def read_answers(
    model: TransformerXL, hidden_BLD: Array, segment: OneSegment
) -> tuple[Array, Array]:
    """Returns (nll_BL, whether the target is the likeliest token)."""
    log_probs_BLV = model.embedding.log_probs(hidden_BLD)
    right_BL = jnp.argmax(log_probs_BLV, axis=-1) == segment.targets_BL
    return model.embedding.nll(hidden_BLD, segment.targets_BL), right_BL


@reader.from_hidden
def read_nll(model: TransformerXL, hidden_BLD: Array, segment: OneSegment) -> Array:
    """Returns nll_BL."""
    return model.embedding.nll(hidden_BLD, segment.targets_BL)


def score_tokens(
    loaded: Loaded, options: EvalConfig, text_T: np.ndarray, answers: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns nll_T of all tokens but the first, and with `answers` which are right."""
    model, B, L = loaded.model.config, options.streams, options.tgt_len
    if options.cache_len:
        read = continuous_cache.make_reader(model, options, loaded.mesh, summed=False)
    else:
        output = read_answers if answers else read_nll
        chosen = evaluation_model(model, options)
        read = reader.Reader(chosen, output, B, L, loaded.mesh, n_segments=0)
    segments = [*Streams(text_T, B, L).epoch()]
    outputs = jax.device_get([*read.read(loaded.params, segments)])
    is_real_BT = np.concatenate([x.weights_SBL[0] for x in segments], axis=1) > 0

    def in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
        joined_BT = np.concatenate(parts, axis=1)
        return joined_BT[:, : is_real_BT.shape[1]][is_real_BT]

    if options.cache_len or not answers:
        return in_order(outputs), None
    nll_T, right_T = (in_order(parts) for parts in zip(*outputs, strict=True))
    return nll_T, right_T


def find_scored(text_T: np.ndarray, answers: bool) -> np.ndarray:
    """Returns whether each token but the first counts."""
    return text_T[1:] >= (FIRST_ANSWER if answers else 0)


def tune(
    loaded: Loaded, options: EvalConfig, text_T: np.ndarray, answers: bool
) -> EvalConfig:
    """Returns the best options of the cache on a text, or on its answers."""
    scored_T = find_scored(text_T, answers)

    def loss(tried: EvalConfig) -> float:
        nll_T, _ = score_tokens(loaded, tried, text_T, answers)
        return float(nll_T[scored_T].mean())

    grid = [
        dataclasses.replace(options, cache_theta=theta, cache_weight=weight)
        for theta in CACHE_THETAS
        for weight in CACHE_WEIGHTS
    ]
    return min(grid, key=loss)


def identifier_loss(nll_T: np.ndarray, text_T: np.ndarray) -> Json:
    """Returns the loss, in nats, of second occurrences of identifiers in a file.

    Only occurrences farther from the first than the memory's length count.
    """
    losses, text, start = [], text_T.astype(np.uint8).tobytes(), 0
    nll_T = np.concatenate([[0.0], nll_T])  # the first byte is not scored
    for part in split_stdlib()["test"]:
        end = start + size([part])
        for low, high in repeated(text[start:end], COMMON["model.mem_len"]):
            losses.append(nll_T[start + low : start + high].sum())
        start = end
    mean = float(np.mean(losses)) if losses else None
    return {"identifier_loss": mean, "identifiers": len(losses)}


def repeated(text: bytes, distance: int) -> list[tuple[int, int]]:
    """Returns second occurrences over `distance` bytes after the first, as ranges."""
    first: dict[bytes, int] = {}
    found, seen = [], {x.encode() for x in keyword.kwlist}
    for match in re.finditer(rb"\b[A-Za-z_]\w{3,}", text):
        name = match[0]
        if name not in first:
            first[name] = match.start()
        elif name not in seen:
            seen.add(name)
            if match.start() - first[name] > distance:
                found.append(match.span())
    return found


def costs(loaded: Loaded, row: Config, folder: Path) -> Json:
    """Returns parameters, bytes of state, speed and memory of the training."""
    described = run_record.read_run(folder)
    model, train = loaded.config.model, row.train
    # The compiler's figures for the device's bytes in an update of G segments.
    updater = make_updater(model, train, row.optim, loaded.mesh)
    S, B, L = train.segments_per_call, train.batch_size, train.tgt_len
    segments = abstract_segments(loaded.mesh, S, B, L)
    step = Program("the training step", updater.step, carries=True, donates=True)
    compiled = compile_step_for(loaded.mesh, step, updater.like, segments)
    tokens = train.num_steps * train.segments_per_update * B * L
    return {
        "parameters": described["parameters"],
        "state_bytes": state_bytes(model, row.eval),
        "train_tokens": tokens,
        "tokens_per_second": tokens / spent_seconds(folder / METRICS)["update"],
        "train_step_bytes": compiled.bytes,
    }


def state_bytes(model: ModelConfig, options: EvalConfig) -> int:
    """Returns a stream's bytes between segments, including the cache."""
    memory = jax.eval_shape(lambda: choose_kind(model).empty(1))
    arrays = [(x.shape, x.dtype) for x in jax.tree.leaves(memory)]
    held = sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)
    entry = model.d_model * model.compute_dtype.itemsize + 4
    return held + options.cache_len * entry


def write(table: TableConfig, workdir: Path, cells: list[Json], origin: Json) -> Json:
    """Writes the table's files, and returns its JSON."""
    rows = summarize(cells)
    text = f"# Memories\n\n{describe_origin(origin)}\n{markdown(rows, table.seeds)}"
    result = {**dataclasses.asdict(table), **origin, "rows_by_task": rows}
    result |= {"cells": cells, "workdir": str(workdir)}

    def draw(_: Json, path: Path) -> None:
        plot(rows, path)
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
    means = {
        name: statistics.fmean(run[name] for run in runs)
        for name in ("accuracy", "identifier_loss", "tokens_per_second")
        if runs[0].get(name) is not None
    }
    same = {x: runs[0][x] for x in ("parameters", "state_bytes", "train_step_bytes")}
    nlls = [run["nll"] for run in runs]
    found: Json = {**same, **means, "nll": comparison.measure(nlls)._asdict()}
    if other != kind and other in kinds:
        base_nlls = {run["seed"]: run["nll"] for run in kinds[other]}
        pairs = [(x["nll"], base_nlls.get(x["seed"])) for x in runs]
        differences = [x - y for x, y in pairs if y is not None]
        found |= {"verdict": judge(differences), "compared_with": other}
    return found


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
