"""Makes the paper's Table 6, 7 or 10 again: trains its rows, scores and compares them.

Each row is trained by the ordinary training, each seed in a workdir of its own below
the table's, and scored with attention of several lengths. What is finished is not done
again, so the same command goes on.

Dims: L segment, M memory.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from txl_jax import config as configs
from txl_jax import outcome
from txl_jax.ablation import TableConfig
from txl_jax.config import Config
from txl_jax.data.tokens import Tokens
from txl_jax.distributed import is_first
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import EvalConfig, make_evaluate
from txl_jax.outcome import Outcome
from txl_jax.preemption import stop
from txl_jax.report.dots import plot_rows
from txl_jax.report.writer import say, to_json
from txl_jax.restore import load

Done = dict[str, Any]
# What to make of a trained run: (config, workdir, tokens, done) -> result.
Conclude = Callable[[Config, Path, Tokens, Done], Done]
Learn = Callable[[Config, Path, Conclude], Done]

RESULT = "lengths.json"  # in a run's workdir: its nll by attention length

# Lengths of attention that are tried, in segments: the paper's are 120 to 640 tokens
# with segments of 128.
SEGMENTS = (1, 1.5, 2, 3, 4, 5)

# The miniature. Lengths are an eighth of the published ones, layers two sevenths, and
# the other sizes are these, the same in all rows.
SHORTER = 8
LENGTHS = {
    "model": ("mem_len", "n_position"),
    "train": ("tgt_len",),
    "eval": ("tgt_len", "mem_len", "ext_len", "clamp_len"),
    "generate": ("mem_len", "ext_len"),
}
FEWER = 2 / 7
STEPS = 12_000


def shrink(c: ConfigDict) -> None:
    """Makes a published config a miniature of itself, for hours on 2 CPU cores.

    Only sizes shrink: recurrence, positions and loss stay the row's.
    """
    for section, names in LENGTHS.items():
        c[section].update({name: c[section][name] // SHORTER for name in names})
    c.model.n_layer = round(c.model.n_layer * FEWER)
    c.model.update(d_model=64, d_embed=0, n_head=2, d_head=32, d_inner=256)
    # Bytes, of which an adaptive softmax would have nothing to gain.
    c.model.update(cutoffs=(), div_val=1, tie_projs=(), dropout=0.0, dropatt=0.0)
    c.model.unroll = c.model.n_layer
    c.data.update(corpus="stdlib", vocab="byte", convention="")
    c.train.update(batch_size=32, segments_per_call=4, num_steps=STEPS, log_every=100)
    c.optim.update(lr=5e-3, schedule="cosine", min_lr_ratio=0.0)
    c.eval.streams = 64


def row_config(
    name: str, how: TableConfig, overrides: dict[str, str], number: int = 0
) -> Config:
    """Returns the config of a row's run, with the command line's overrides."""
    c = configs.load(name)
    if how.scale == "cpu":
        shrink(c)
    if how.steps:
        c.train.num_steps = how.steps
    c.train.seed += number
    if how.scale == "cpu":
        steps = c.train.num_steps
        c.train.eval_every = steps  # once, at the end
        c.optim.warmup_steps = min(200, steps // 10)
        c.checkpoint.update(every_steps=max(steps // 16 * 4, 4), keep=1)
    for field, text in overrides.items():
        configs.override(c, field, text)
    row = configs.parse(c)
    if how.scale == "full":
        return row
    return dataclasses.replace(row, eval=attend(row, init_len(row)))


def init_len(row: Config) -> int:
    """Returns the attention length of training: of a segment's last token, M + L."""
    return row.model.mem_len + row.train.tgt_len


def lengths(row: Config) -> list[int]:
    """Returns the attention lengths, in tokens, that a row is scored with.

    A model with a learned row for each place attends no farther than it has rows.
    """
    L = row.train.tgt_len
    found = {init_len(row), *(int(segments * L) for segments in SEGMENTS)}
    if row.model.position == "learned":
        found = {length for length in found if length <= row.model.n_position}
    return sorted(found)


def attend(row: Config, length: int) -> EvalConfig:
    """Returns an evaluation that attends to `length` tokens.

    With a memory every token sees as many before it. Without, windows of so many are
    read anew for each half of a segment, as in the published evaluation.
    """
    L = row.train.tgt_len
    if row.model.mem_len:
        return dataclasses.replace(
            row.eval, tgt_len=L, mem_len=length, ext_len=0, same_length=True
        )
    step = max(L // 2, 1)
    return dataclasses.replace(
        row.eval, tgt_len=step, mem_len=0, ext_len=length - step, same_length=False
    )


# The seeds of a row share what is compiled for each length.
make_evaluate_once = functools.lru_cache(maxsize=2 * len(SEGMENTS))(make_evaluate)


def score(how: TableConfig, row: Config, folder: Path, tokens: Tokens) -> Done:
    """Returns the nll of a trained run by attention length."""
    loaded = load(folder, row)
    text = tokens.split(row.eval.split)[: how.scored or None]
    nll_nats = {}
    for length in lengths(row):
        evaluate = make_evaluate_once(
            loaded.config.model, attend(row, length), loaded.mesh
        )
        scores = evaluate(loaded.params, text, listen)
        nll_nats[str(length)] = scores["nll"]
    return {"nll_nats": nll_nats, "tokens": scores["tokens"]}


def listen(done: int, total: int) -> None:
    """Ends at a signal, between two segments: scoring a run begins anew."""
    if stop.at_boundary():
        raise stop.end("while scoring")


def asked(how: TableConfig, row: Config) -> Done:
    """Returns what a run's result depends on: JSON, to be compared with RESULT's."""
    asked = {"scored": how.scored, "lengths": lengths(row), **dataclasses.asdict(row)}
    for section in ("checkpoint", "run", "table"):
        del asked[section]
    return json.loads(to_json(asked))


def finished(how: TableConfig, row: Config, folder: Path) -> Done | None:
    """Returns the run's result where the very same was asked before."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
        return result if result["asked"] == asked(how, row) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / RESULT} is damaged ({error}): delete it to score the run again"
        ) from error


def run_once(how: TableConfig, row: Config, folder: Path, learn: Learn) -> Done:
    """Returns a run's result, from its workdir where it is there already."""
    if result := finished(how, row, folder):
        return result
    say(f"Table {how.table}: {folder}")
    result = learn(
        row, folder, lambda row, at, tokens, done: done | score(how, row, at, tokens)
    )
    if is_first():
        fresh = (folder / RESULT).with_suffix(".tmp")
        kept = {"asked": asked(how, row), **result}
        fresh.write_text(to_json(kept, indent=2) + "\n", "utf-8")
        fresh.replace(folder / RESULT)
    return result


def run(
    how: TableConfig, folder: Path, overrides: dict[str, str], learn: Learn
) -> Done:
    """Makes the table in `folder` and returns what is in it.

    learn(config, workdir, conclude) is the ordinary training, which goes on where it
    was; conclude gets the trained run. Leaves tableN.md, .json and .png.
    """
    plan = {
        name: [row_config(name, how, overrides, number) for number in range(how.seeds)]
        for name in how.chosen
    }
    outcomes: dict[str, Outcome] = {}
    for name, rows in plan.items():
        nlls = []
        for row in rows:
            result = run_once(how, row, folder / name / f"seed_{row.train.seed}", learn)
            nlls.append({int(k): nll for k, nll in result["nll_nats"].items()})
        outcomes[name] = outcome.summarise(nlls, init_len(rows[0]))
    return conclude(how, folder, outcomes, plan)


def conclude(
    how: TableConfig,
    folder: Path,
    outcomes: dict[str, Outcome],
    plan: dict[str, list[Config]],
) -> Done:
    """Writes the table, and returns it as JSON."""
    first = next(iter(plan.values()))[0]
    title = f"Table {how.table} at scale {how.scale}"
    text = f"{title}. {describe(how, first)}\n\n"
    text += outcome.markdown(how.table, outcomes)
    result = {
        **dataclasses.asdict(how),
        "updates": {name: rows[0].train.num_steps for name, rows in plan.items()},
        "corpus": first.data.corpus,
        "outcomes": {name: outcome.as_json(one) for name, one in outcomes.items()},
        "comparisons": [
            {**dataclasses.asdict(each), "verdict": each.verdict}
            for each in outcome.compare(how.table, outcomes)
        ],
        "workdir": str(folder),
    }
    if is_first():
        stem = folder / f"table{how.table}"
        stem.with_suffix(".md").write_text(text, "utf-8")
        stem.with_suffix(".json").write_text(to_json(result, indent=2) + "\n", "utf-8")
        drawn = {
            name: (
                dataclasses.astuple(one.init),
                dataclasses.astuple(one.best),
                how.chosen[name].best,
            )
            for name, one in outcomes.items()
        }
        plot_rows(title, drawn, stem.with_suffix(".png"))
    say(text)
    return result


def describe(how: TableConfig, row: Config) -> str:
    """Returns in a paragraph what was run; `row` is the first."""
    model, train, scored = row.model, row.train, how.scored or "all"
    return (
        f"`{next(iter(how.chosen))}` has {model.n_layer} layers of {model.d_model}, "
        f"segments of {train.tgt_len} tokens and a memory of {model.mem_len}; it was "
        f"trained for {train.num_steps} updates of {train.batch_size} streams on "
        f"corpus `{row.data.corpus}` (vocabulary `{row.data.vocab}`), and {scored} "
        f"tokens of its {row.eval.split} split were scored. Mean of {how.seeds} "
        "seeds, in brackets least and greatest. The paper's numbers are perplexities "
        "per word of far larger models: compare directions, not sizes."
    )
