"""The learning curve of a run: a log to commit, and a figure.

    python -m txl_jax.experiments.figures.learning --workdir=runs/long \\
        --log=long.jsonl --picture=long.png [--level="nanoGPT=1.4697"]

The log's first line describes the run: its config, git revision, libraries, device and
seed. Every further line is a validation: updates, tokens read, seconds of training with
compilation and without validation, the training loss (with dropout, the mean over the
updates in metrics.jsonl since the previous line) and the validation loss, both in nats
per token. A level is a published result, drawn as a line. Prints the best validation.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from txl_jax import config as configs
from txl_jax.errors import UserError
from txl_jax.fields import Role
from txl_jax.report.metrics_log import read_metrics
from txl_jax.report.plots import empty
from txl_jax.runtime.storage import write_atomically
from txl_jax.workdir.folder import METRICS, RUN
from txl_jax.workdir.run_record import read_run

from . import program

PROVENANCE = (
    *("parameters", "git_revision", "versions", "device_kind", "device_count"),
    "config",
)
# Sections that training depends on; others may name folders of the machine.
SECTIONS = ("model", "data", "train", "optim", "eval", "mesh")
TRAINING = "compile", "update", "input"  # purposes whose seconds are added up


def parse_level(text: str) -> tuple[str, float]:
    """Parses NAME=NATS."""
    name, _, nats = text.rpartition("=")
    return name, float(nats)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = program.make_parser(__doc__)
    parser.add_argument(
        "--workdir", type=program.path, required=True, help="of the run"
    )
    parser.add_argument(
        "--log", type=program.path, required=True, help="the .jsonl to write"
    )
    parser.add_argument(
        "--picture", type=program.picture, required=True, help="the .png to write"
    )
    parser.add_argument(
        "--level",
        type=parse_level,
        action="append",
        default=[],
        metavar="NAME=NATS",
        help="a line to draw",
    )
    return parser


def find_validations(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns updates, seconds and losses of each validation in a metrics.jsonl."""
    validations, losses = [], []
    for line in metrics:
        exact = line["exact"]
        if exact.get("loss") is not None:
            losses.append(exact["loss"])
        if exact.get("valid_nll") is None:
            continue
        spent = line["timing"]["total_seconds"]
        validation = {
            "updates": line["step"],
            "seconds": round(sum(spent[name] for name in TRAINING), 1),
            "train_nats": round(statistics.fmean(losses), 4),
            "valid_nats": round(exact["valid_nll"], 4),
        }
        validations.append(validation)
        losses = []
    return validations


def plot(
    lines: list[dict[str, Any]], levels: list[tuple[str, float]], path: Path
) -> None:
    """Draws both losses against the tokens read."""
    figure = empty(8, 4.2)
    axes = figure.add_subplot()
    millions = [line["tokens"] / 1e6 for line in lines]
    for name, label, style in (
        ("train_nats", "training", "-"),
        ("valid_nats", "validation", "o-"),
    ):
        values = [line[name] for line in lines]
        axes.plot(millions, values, style, markersize=4, label=label)
    for number, (name, nats) in enumerate(levels):
        color = f"C{number + 2}"
        axes.axhline(nats, color=color, linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="tokens read, in millions", ylabel="loss, in nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the best validation; writes the log and the picture."""
    run = read_run(args.workdir)
    if not run.get("starts"):
        raise UserError(f"{args.workdir} holds no run (no start in {RUN})")
    run |= run["starts"][0]
    train = run["config"]["train"]
    if train["varlen"]:
        raise UserError("its segments vary in length: tokens are not counted")
    tokens = train["batch_size"] * train["tgt_len"] * train["segments_per_update"]
    lines = find_validations(read_metrics(args.workdir / METRICS))
    if not lines:
        raise UserError(f"{args.workdir} has no validation yet")
    lines = [{**line, "tokens": line["updates"] * tokens} for line in lines]
    config = {section: run["config"][section] for section in SECTIONS}
    for section in SECTIONS:
        for field in configs.SECTIONS[section].fields():
            if Role.LOCAL in field.roles and section != "mesh":
                config[section].pop(field.key, None)
    run["config"] = config
    rows = [{name: run[name] for name in PROVENANCE}, *lines]
    write_atomically(args.log, "".join(f"{json.dumps(row)}\n" for row in rows))
    plot(lines, args.level, args.picture)
    return min(lines, key=lambda line: line["valid_nats"])


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
