"""The mode `table`: reproduces the paper's Table 6, 7 or 10.

Every row is trained with several seeds, each in a subfolder of the table's workdir, and
scored with several attention lengths. The results of finished runs are saved, so the
same command resumes an interrupted table.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from txl_jax.config import Config, values_of, with_values
from txl_jax.config import load as load_experiment
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.fields import Values
from txl_jax.paper import comparison
from txl_jax.paper.comparison import RowResult
from txl_jax.paper.options import TABLES, TableConfig
from txl_jax.report.log import say
from txl_jax.report.metrics_log import spent_seconds
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import Json, refusing_damage, write_atomically
from txl_jax.train import Run, plan
from txl_jax.workdir import run_record
from txl_jax.workdir.folder import METRICS, RUN
from txl_jax.workdir.load import load
from txl_jax.workdir.results import cached
from txl_jax.workdir.staging import write_files

RESULT = "lengths.json"  # in a run's workdir: its nll by attention length
ASKED = "asked"  # the config, in the file of a run's result

# Attention lengths, as multiples of training's: the paper's are 120 and 260 tokens for
# 128, and 500 for 256.
MULTIPLES = (0.5, 0.75, 1, 1.5, 2, 2.5)

# The miniature has an eighth of the published lengths and two sevenths of the layers.
SHORTER = 8
SHORTENED = (
    *("model.mem_len", "model.n_position", "train.tgt_len", "eval.tgt_len"),
    *("eval.mem_len", "eval.ext_len", "generate.mem_len"),
)
FEWER = 2 / 7
STEPS = 4_800
SCORED = 100_000  # tokens from the start of the split
SMALL: Values = {
    **{"model.d_model": 64, "model.d_embed": 0, "model.n_head": 2, "model.d_head": 32},
    **{"model.d_inner": 256, "model.dropout": 0.0, "model.dropatt": 0.0},
    # An adaptive softmax does not help with 256 bytes.
    **{"model.cutoffs": (), "model.div_val": 1, "model.tie_projs": ()},
    **{"data.corpus": "stdlib", "data.vocab": "byte", "data.convention": ""},
    **{"train.batch_size": 32, "train.segments_per_call": 4},
    **{"train.num_steps": STEPS, "train.log_every": 100},
    **{"optim.optimizer": "muon", "optim.lr": 5e-3},
    **{"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0},
    **{"eval.streams": 64, "eval.max_tokens": SCORED, "eval.clamp_len": 0},
}


def ablate(table: TableConfig, workdir: Path, overrides: Values) -> Json:
    """Makes the table, with overrides for all rows; writes tableN.md, .json, .png."""
    configs = {
        name: [row_config(name, overrides, seed) for seed in range(table.seeds)]
        for name in TABLES[table.table]
        if name in (table.rows or TABLES[table.table])
    }
    results: dict[str, RowResult] = {}
    folders: list[Path] = []
    for name, rows in configs.items():
        nlls = []
        for row in rows:
            folders.append(workdir / name / f"seed_{row.train.seed}")
            nlls.append(run_once(row, folders[-1]))
        results[name] = comparison.summarize(nlls, init_len(rows[0]))
    first = {name: rows[0] for name, rows in configs.items()}
    return write(table, workdir, results, first, describe_runs(folders))


def run_once(row: Config, workdir: Path) -> dict[int, float]:
    """Returns a run's nll by attention length, from its workdir if it is finished."""

    def measure(run: Run) -> Json:
        return run.result | score(row, workdir, run.tokens)

    path = workdir / RESULT
    result = train_once(row, path, measure)
    with refusing_damage(path):
        return {x: float(result["nll_nats"][str(x)]) for x in lengths(row)}


def train_once(row: Config, path: Path, measure: Callable[[Run], Json]) -> Json:
    """Trains a run in a file's folder and returns what `measure` finds.

    A file with the result of the same config is returned instead.
    """

    def train_and_measure() -> Json:
        say(f"training and scoring {path.parent}")
        with plan(row, path.parent) as run:
            run.train()
            return measure(run)

    return cached(path, {ASKED: identity(row)}, train_and_measure)


def identity(row: Config) -> Json:
    """Returns all fields on which a run's result depends."""
    fields = dataclasses.asdict(row)
    for section in ("checkpoint", "run", "table"):
        del fields[section]
    return fields


def score(row: Config, workdir: Path, tokens: Tokens) -> Json:
    """Returns the nll of a trained run by attention length; a signal interrupts it."""
    loaded, text = load(workdir, row), tokens.split(row.eval.split)
    nll_nats = {}
    for length in lengths(row):
        evaluation = attend(loaded.config, length)
        model, mesh, ids = loaded.config.model, loaded.mesh, loaded.ids
        evaluate = make_evaluate(
            model, evaluation, mesh, reset_memory_at=ids.eval_reset
        )
        with Progress(f"attention to {length} tokens") as progress:
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
    title = f"Table {table.table}, small models"
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
        write_atomically(path.with_suffix(".md"), text)

    say(text)
    return result | write_files(workdir / f"table{table.table}", result, plot)


def describe_runs(workdirs: list[Path]) -> Json:
    """Returns the revisions, devices, days and hours of runs; raises UserError.

    The hours are without start-up, shutdown and downtime.
    """
    hours, revisions, devices, days = 0.0, set(), set(), set()
    for workdir in workdirs:
        run = run_record.read_run(workdir)
        hours += sum(spent_seconds(workdir / METRICS).values()) / 3600
        with refusing_damage(workdir / RUN):
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


def row_config(name: str, overrides: Values, number: int = 0) -> Config:
    """Returns the config of one run of a row, with its seed and all overrides."""
    row = shrink(load_experiment(name))
    row = finish(row, overrides, number, most_warmup=200)
    # No other position is clamped.
    if row.model.position == "transformer_xl" and "eval.clamp_len" not in overrides:
        row = with_values(row, {"eval.clamp_len": init_len(row) - 1})
    return dataclasses.replace(row, eval=attend(row, init_len(row)))


def finish(config: Config, overrides: Values, number: int, most_warmup: int) -> Config:
    """Returns the config of a run, with a validation at its end."""
    steps = overrides.get("train.num_steps", config.train.num_steps)
    values = {
        "train.seed": config.train.seed + number,
        "train.eval_every": steps,
        "optim.warmup_steps": min(most_warmup, steps // 10),
        "checkpoint.every_steps": max(steps // 16 * 4, 4),
        "checkpoint.keep": 1,
    }
    return with_values(config, values | overrides)


def shrink(config: Config) -> Config:
    """Returns the config of a model that trains in minutes on a CPU core."""
    published, n_layer = values_of(config), round(config.model.n_layer * FEWER)
    layers = {"model.n_layer": n_layer, "model.unroll": n_layer}
    shorter = {name: published[name] // SHORTER for name in SHORTENED}
    return with_values(config, {**SMALL, **layers, **shorter})


def init_len(row: Config) -> int:
    """Returns the attention length of training, M + L for a segment's last token."""
    return row.model.mem_len + row.train.tgt_len


def lengths(row: Config) -> list[int]:
    """Returns a row's attention lengths, in tokens, up to its learned positions."""
    tried = {int(multiple * init_len(row)) for multiple in MULTIPLES}
    # A window holds the scored part of a segment.
    shortest = 0 if row.model.mem_len else scored_part(row)
    longest = row.model.n_position if row.model.position == "learned" else max(tried)
    return sorted(length for length in tried if shortest <= length <= longest)


def scored_part(row: Config) -> int:
    """Returns the number of tokens that a window scores, half of a segment."""
    return max(row.train.tgt_len // 2, 1)


def attend(row: Config, length: int) -> EvalConfig:
    """Returns an evaluation that attends to `length` tokens.

    With a memory, every token sees `length` tokens. Without one, a window of `length`
    tokens is read for each half of a segment, as in the published evaluation.
    """
    L, M, before = row.train.tgt_len, length, 0
    if not row.model.mem_len:
        L, M, before = scored_part(row), 0, length - scored_part(row)
    return dataclasses.replace(
        row.eval, tgt_len=L, mem_len=M, ext_len=before, same_length=M > 0
    )
