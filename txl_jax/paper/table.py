"""The mode `table`: reproduces the paper's Table 6, 7 or 10.

Every row is trained with several seeds, each in a subfolder of the table's workdir, and
scored with several attention lengths. Finished runs are kept, so the same command
resumes an interrupted table.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from txl_jax.config import Config
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.paper import comparison
from txl_jax.paper.comparison import RowResult
from txl_jax.paper.options import TABLES, TableConfig
from txl_jax.paper.table_rows import MULTIPLES, attend, init_len, lengths, row_config
from txl_jax.report.log import Json, say, to_json
from txl_jax.report.progress import interruptible
from txl_jax.report.timing import PURPOSES
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import write_atomically
from txl_jax.workdir import claim
from txl_jax.workdir.folder import RUN
from txl_jax.workdir.load import load
from txl_jax.workdir.staging import write_files

RESULT = "lengths.json"  # in a run's workdir: its nll by attention length


class TrainedRun(Protocol):
    """A run that has reached its last update, and still locks its workdir."""

    tokens: Tokens  # the corpus
    result: Json  # of its training


# Trains a row in a workdir.
Train = Callable[[Config, Path], AbstractContextManager[TrainedRun]]


def run(
    table: TableConfig, workdir: Path, overrides: dict[str, str], train: Train
) -> Json:
    """Makes the table, all rows with the overrides; writes tableN.md, .json, .png."""
    plan = {
        name: [row_config(name, table, overrides, seed) for seed in range(table.seeds)]
        for name in TABLES[table.table]
        if name in (table.rows or TABLES[table.table])
    }
    results: dict[str, RowResult] = {}
    folders: list[Path] = []
    for name, rows in plan.items():
        nlls = []
        for row in rows:
            folders.append(workdir / name / f"seed_{row.train.seed}")
            nlls.append(run_once(row, folders[-1], train))
        results[name] = comparison.summarize(nlls, init_len(rows[0]))
    first = {name: rows[0] for name, rows in plan.items()}
    return write(table, workdir, results, first, describe_runs(folders))


def run_once(row: Config, workdir: Path, train: Train) -> dict[int, float]:
    """Returns one run's nll by attention length, from its workdir if it is finished."""
    path = workdir / RESULT
    result = keep(
        row, path, train, lambda run: run.result | score(row, workdir, run.tokens)
    )
    with claim.refusing_damage(path):
        return {x: float(result["nll_nats"][str(x)]) for x in lengths(row)}


def keep(
    row: Config, path: Path, train: Train, measure: Callable[[TrainedRun], Json]
) -> Json:
    """Returns the result in a file of the run's workdir for the same config.

    If there is none, trains, and writes what `measure` returns.
    """
    asked = identity(row)
    with claim.refusing_damage(path):
        if path.exists():
            saved: Json = json.loads(path.read_text("utf-8"))
            if saved["asked"] == asked:
                return saved
    say(f"training and scoring {path.parent}")
    with train(row, path.parent) as run:
        result = {"asked": asked, **measure(run)}
        text = to_json(result, indent=2) + "\n"
        if distributed.is_first():
            write_atomically(path, lambda file: file.write_text(text, "utf-8"))
    return result


def identity(row: Config) -> Json:
    """Returns all fields that a run's result depends on, in JSON types."""
    fields = dataclasses.asdict(row)
    for section in ("checkpoint", "run", "table"):
        del fields[section]
    return json.loads(to_json(fields))


# The seeds of a row share the program compiled for each length.
make_evaluate_once = functools.lru_cache(maxsize=2 * len(MULTIPLES))(make_evaluate)


def score(row: Config, workdir: Path, tokens: Tokens) -> Json:
    """Returns the nll of a trained run by attention length; a signal interrupts it."""
    loaded, text = load(workdir, row), tokens.split(row.eval.split)
    nll_nats = {}
    for length in lengths(row):
        evaluation = attend(loaded.config, length)
        evaluate = make_evaluate_once(loaded.config.model, evaluation, loaded.mesh)
        with interruptible(f"attention to {length} tokens") as progress:
            scores = evaluate(loaded.params, text, progress)
        nll_nats[str(length)] = scores["nll"]
    return {"nll_nats": nll_nats, "tokens": scores["tokens"]}


def write(
    table: TableConfig,
    workdir: Path,
    results: dict[str, RowResult],
    rows: dict[str, Config],
    origin: Json,
) -> Json:
    """Writes the table's files; returns its JSON. rows: a config of each row."""
    name, first = next(iter(rows.items()))
    title = f"Table {table.table} at scale {table.scale}"
    text = f"{title}. {describe(table, name, first)} {describe_origin(origin)}\n\n"
    text += comparison.markdown(table.table, results)
    result = {
        **dataclasses.asdict(table),
        "scored": first.eval.max_tokens,
        "updates": {name: row.train.num_steps for name, row in rows.items()},
        "corpus": first.data.corpus,
        **origin,
        "outcomes": {name: row._asdict() for name, row in results.items()},
        "comparisons": [
            {**each._asdict(), "verdict": each.verdict}
            for each in comparison.compare(table.table, results)
        ],
        "workdir": str(workdir),
    }

    def plot(_: Json, path: Path) -> None:
        comparison.plot(title, table.table, results, path)
        path.with_suffix(".md").write_text(text, "utf-8")

    say(text)
    return result | write_files(workdir / f"table{table.table}", result, plot)


def describe_runs(workdirs: list[Path]) -> Json:
    """Returns the revisions, devices, days and hours of runs; raises UserError.

    The hours are without start-up, shutdown and downtime.
    """
    hours, revisions, devices, days = 0.0, set(), set(), set()
    for workdir in workdirs:
        run = claim.read_run(workdir)
        with claim.refusing_damage(workdir / RUN):
            seconds = run.get("goodput", {}).get("seconds", {})
            hours += sum(seconds.get(name, 0.0) for name in PURPOSES) / 3600
            for start in run.get("starts", []):
                revisions.add(str(start["git_revision"]))
                devices.add(f"{start['device_count']} x {start['device_kind']}")
                days.add(start["time"][:10])
    return {
        "hours": hours,
        "git_revisions": sorted(revisions),
        "devices": sorted(devices),
        "days": sorted(days),
    }


def describe(table: TableConfig, name: str, row: Config) -> str:
    """Describes how the table was made, by its first row."""
    model, train = row.model, row.train
    tokens = train.num_steps * train.batch_size * train.tgt_len
    return (
        f"`{name}` has {model.n_layer} layers of {model.d_model}, segments of "
        f"{train.tgt_len} tokens and a memory of {model.mem_len}; it was trained for "
        f"{train.num_steps:,} updates of {train.batch_size} streams, {tokens:,} tokens "
        f"of corpus `{row.data.corpus}`. Numbers are means over {table.seeds} seeds, "
        "with minimum and maximum; the paper's are of far larger models."
    )


def describe_origin(origin: Json) -> str:
    """Describes when, where and from which revisions the runs were made."""
    commits = ", ".join(f"`{revision[:7]}`" for revision in origin["git_revisions"])
    devices = " and ".join(origin["devices"])
    days = ", ".join(origin["days"])
    return (
        f"Training all runs, with validation, took {origin['hours']:.1f} hours on "
        f"{devices} ({days}; revision {commits})."
    )
