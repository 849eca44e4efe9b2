"""Trains small models with each addition of docs/howto/variants.md.

    python -m experiments.benchmarks.variants [--seeds=3] [--only=rotary,muon]
    python -m experiments.benchmarks.variants --text=stdlib --only=paper,all

Every row is one recipe with a few fields changed, at equal tokens and, but for the
rounding of gated layers, equal parameters. `dynamic` and `cache` evaluate the trained
`paper` of the same seed with options that are chosen on the validation split. The
recipe of tiny Shakespeare screens them; the bytes of Python's standard library and the
words of WikiText-2 confirm the best.
Each run is scored on the test split and adds a line to variants.jsonl; runs that have
one are not repeated, and an interrupted run is resumed from --workdir. variants.md has
a table of all lines for each text.
"""

import argparse
import datetime
import functools
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks import record
from experiments.figures import program
from txl_jax.errors import refuse, require_one_of
from txl_jax.report.log import read_metrics
from txl_jax.report.provenance import git_revision
from txl_jax.workdir.folder import METRICS

HERE = Path(__file__).parent
LINES, PAGE = HERE / "variants.jsonl", HERE / "variants.md"


class Text(NamedTuple):
    """A text and the recipe that is changed for each variant."""

    title: str
    recipe: str
    wider: int  # d_inner that makes up for the missing weights W_R
    lr: float
    fields: tuple[str, ...] = ()
    tuned_on: int = 30_000  # tokens in the validation split

    def changes(self, name: str) -> list[str]:
        """Returns the fields that a variant changes."""
        lrs = {"half": self.lr / 2, "twice": self.lr * 2}
        return [x.format(wider=self.wider, **lrs) for x in VARIANTS[name]]


_WORDS = "data.corpus=wikitext2", "data.vocab=word", "model.cutoffs=2000,10000"
TEXTS = {
    "shakespeare": Text("Tiny Shakespeare, characters", "shakespeare", 512, 0.003),
    "stdlib": Text(
        "Python's standard library, bytes", "quickstart", 576, 0.003, tuned_on=100_000
    ),
    "wikitext2": Text(
        "WikiText-2, words",
        "quickstart",
        576,
        0.001,
        (
            *(*_WORDS, "model.div_val=4", "model.dropout=0.1", "eval.baselines=false"),
            *("train.num_steps=3000", "train.eval_every=1000", "generate.num_tokens=1"),
            *("generate.prompt=the", "optim.lr=0.001"),
        ),
    ),
}
WIDER = ("model.d_inner={wider}",)
# Scored with the lengths of training: rotations do not reach beyond them.
ROTARY = ("model.position=rotary", *WIDER, "eval.tgt_len=32", "eval.mem_len=64")
MODERN = "model.norm=rms", "model.qk_norm=true", "model.feed_forward=swiglu"
VARIANTS: dict[str, tuple[str, ...]] = {
    "paper": (),
    "rotary": ROTARY,
    "alibi": ("model.position=alibi", *WIDER),
    "rms": ("model.norm=rms",),
    "geglu": ("model.feed_forward=geglu",),
    "swiglu": ("model.feed_forward=swiglu",),
    "qk_norm": ("model.qk_norm=true",),
    "adamw": ("optim.weight_decay=0.1",),
    "muon": ("optim.optimizer=muon",),
    "pre_lnorm": ("model.pre_lnorm=true",),
    "all": (*ROTARY, *MODERN, "optim.optimizer=muon"),
    # Shows whether the common learning rate favours a row.
    "half_lr": ("optim.lr={half}",),
    "twice_lr": ("optim.lr={twice}",),
    "muon_twice_lr": ("optim.optimizer=muon", "optim.lr={twice}"),
    "muon_half_lr": ("optim.optimizer=muon", "optim.lr={half}"),
}


class Tuned(NamedTuple):
    """Options of evaluation, each set of them with a sweep on the validation split."""

    options: tuple[tuple[str, ...], ...]
    sweep: str
    values: str


THETAS = 0.01, 0.03, 0.1, 0.3
TUNED = {
    "dynamic": Tuned(
        (("dynamic=rms", "dynamic_segments=2000", "tgt_len=64"),),
        *("dynamic_lr", "0.003,0.01,0.03,0.06,0.1"),
    ),
    "cache": Tuned(
        tuple(("cache_len=2000", f"cache_theta={theta}") for theta in THETAS),
        *("cache_weight", "0.02,0.05,0.1,0.2"),
    ),
}


def line(args: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """Trains or evaluates one run, and returns its line."""
    name, seed = row["variant"], row["seed"]
    folder = "paper" if name in TUNED else name
    workdir = args.workdir / args.text / folder / str(seed)
    do = tune if name in TUNED else train
    changed, valid, result = do(workdir, name, seed, args)
    described = json.loads((workdir / "run.json").read_text("utf-8"))
    return {
        **row,
        "valid_nats": valid and round(valid, 4),
        "test_nats": round(result["nll"], 4),
        "fields": changed,
        "updates": read_metrics(workdir / METRICS)[-1]["step"],
        "parameters": described["parameters"],
        "tokens": result["tokens"],
        "revision": git_revision(),
        "date": datetime.date.today().isoformat(),
    }


Done = tuple[list[str], float | None, dict[str, Any]]


def train(workdir: Path, name: str, seed: int, args: argparse.Namespace) -> Done:
    """Returns a variant's changes, its nats on valid, and its result on test."""
    text = TEXTS[args.text]
    changed = text.changes(name)
    fields = [*text.fields, *changed, f"train.seed={seed}"]
    fields += [f"data.data_dir={args.data_dir}", *args.field]
    if args.tiny:
        fields += ["train.num_steps=4", "eval.max_tokens=500"]
    options = [f"--config={HERE.parent / text.recipe}.py", f"--workdir={workdir}"]
    result = run([*options, *(f"--config.{field}" for field in fields)])
    exact = [x["exact"] for x in read_metrics(workdir / METRICS)]
    valid = [x["valid_nll"] for x in exact if "valid_nll" in x]
    return changed, min(valid, default=None), result


def tune(workdir: Path, name: str, seed: int, args: argparse.Namespace) -> Done:
    """Returns the options that are best on valid, and the results of train()."""
    line = f"{name} evaluates the model of {workdir}: train paper, seed {seed}"
    refuse(not workdir.exists(), line)
    options, sweep, values = TUNED[name]
    on_valid, on_test = (500, 500) if args.tiny else (TEXTS[args.text].tuned_on, 0)
    common = ["--mode=evaluate", f"--workdir={workdir}", "--streams=1"]
    tried = []
    for each in options:
        flags = [*(f"--{option}" for option in each), f"--sweep={sweep}={values}"]
        flags += ["--split=valid", f"--max_tokens={on_valid}"]
        for row in run([*common, *flags])["rows"]:
            tried.append((row["nll"], [*each, f"{sweep}={row[sweep]}"]))
    valid, best = min(tried)
    flags = [*(f"--{option}" for option in best), f"--max_tokens={on_test}"]
    return best, valid, run([*common, "--split=test", *flags])


def run(options: list[str]) -> dict[str, Any]:
    """Runs txl_jax and returns its result; a failure ends this program too."""
    command = [sys.executable, "-m", "txl_jax.main", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # the reason is on stderr
    return json.loads(done.stdout.splitlines()[-1])


def page(lines: list[dict[str, Any]]) -> str:
    """Returns a table for each text, by variant."""
    return "\n".join(
        table(text.title, [x for x in lines if x["text"] == name])
        for name, text in TEXTS.items()
        if any(x["text"] == name for x in lines)
    )


HEAD = (
    *("variant", "changes", "parameters", "updates", "valid, nats", "test, nats"),
    *("perplexity against `paper`", "seeds better"),
)


def table(title: str, lines: list[dict[str, Any]]) -> str:
    """Returns one text's table: means over seeds, and gains over the same seeds."""
    names = (*VARIANTS, *TUNED)
    rows = {name: [x for x in lines if x["variant"] == name] for name in names}
    base = {x["seed"]: x["test_nats"] for x in rows["paper"]}
    cells = []
    for name, runs in rows.items():
        if not runs:
            continue
        nats = [x["test_nats"] for x in runs]
        gains = [x["test_nats"] - base.get(x["seed"], math.nan) for x in runs]
        valid = statistics.fmean(x["valid_nats"] or math.nan for x in runs)
        mean = statistics.fmean(nats)
        gain = math.exp(statistics.fmean(gains)) - 1
        better = sum(each < 0 for each in gains)
        fields = dict.fromkeys(field for x in runs for field in x["fields"])
        changes = " ".join(f"`{field}`" for field in fields)
        spread = f"{mean:.4f} ({min(nats):.4f}–{max(nats):.4f})"
        sizes = (f"{runs[0][size]:,}" for size in ("parameters", "updates"))
        ratio = f"{gain:+.1%}", f"{better} of {len(nats)}"
        cells.append([name, changes, *sizes, f"{valid:.4f}", spread, *ratio])
    scored = f"**{title}**, {lines[0]['tokens']:,} scored in test\n"
    return "\n".join([scored, *record.table(HEAD, cells)]) + "\n"


def compare(args: argparse.Namespace) -> None:
    """Trains what is missing, and prints the tables."""
    known = *VARIANTS, *TUNED
    names = args.only.split(",") if args.only else list(known)
    for name in names:
        require_one_of(name, known, "--only")
    folder = args.workdir
    folder.mkdir(parents=True, exist_ok=True)
    target, table = LINES, PAGE
    if args.tiny:
        target, table = folder / LINES.name, folder / PAGE.name
    rows = [
        {"text": args.text, "variant": name, "seed": seed}
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for name in names
    ]
    record.fill(target, table, page, rows, functools.partial(line, args))
    print(page(record.read_rows(target)))


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--text", choices=TEXTS, default="shakespeare", help="its text")
    parser.add_argument("--field", action="append", default=[], help="of all configs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--first_seed", type=int, default=1, help="first seed")
    parser.add_argument("--only", default="", help="names with commas between them")
    default, text = Path("runs/variants"), "folder of the runs"
    parser.add_argument("--workdir", type=program.path, default=default, help=text)
    parser.add_argument("--data_dir", default="data", help="folder of prepared text")
    parser.add_argument("--tiny", action="store_true", help="try it with 4 updates")
    return program.run(parser, compare, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
