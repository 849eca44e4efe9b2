"""The learning curve of a run: a log to commit, and a figure.

    python -m experiments.figures.learning --workdir=runs/long --log=long.jsonl \\
        --picture=long.png [--level="nanoGPT=1.4697"]

The log's first line describes the run: its config, git revision, libraries, device and
seed. Every further line is a validation: updates, tokens read, seconds of training with
compilation and without validation, and in nats per token the mean loss of training
since the line before, with dropout, and the validation loss. A level is a published
result, drawn as a line. Prints the best validation.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from txl_jax.report.log import read_metrics
from txl_jax.report.plots import empty
from txl_jax.workdir.folder import METRICS, RUN

FACTS = "seed parameters git_revision versions device_kind device_count config".split()
TRAINING = "compile", "update", "input"  # what the seconds are spent on


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="the run's")
    parser.add_argument("--log", type=Path, required=True, help="the .jsonl to write")
    parser.add_argument("--picture", type=Path, required=True, help="the .png to write")
    parser.add_argument(
        "--level", action="append", default=[], help="NAME=NATS, a line to draw"
    )
    return parser.parse_args()


def curve(metrics: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Returns a line for each validation; tokens: those of an update."""
    lines, losses = [], []
    for row in metrics:
        exact = row["exact"]
        if "mean_loss" in exact:
            losses.append(exact["mean_loss"])
        if "valid_nll" not in exact:
            continue
        spent = row["timing"]["total_seconds"]
        line = {
            "updates": row["step"],
            "tokens": row["step"] * tokens,
            "seconds": round(sum(spent[name] for name in TRAINING), 1),
            "train_nats": round(statistics.fmean(losses), 4),
            "valid_nats": round(exact["valid_nll"], 4),
        }
        lines.append(line)
        losses = []
    return lines


def plot(lines: list[dict[str, Any]], levels: dict[str, float], path: Path) -> None:
    """Draws both losses against the tokens read."""
    figure = empty(8, 4.2)
    axes = figure.add_subplot()
    millions = [line["tokens"] / 1e6 for line in lines]
    for name, label, style in (
        ("train_nats", "training, with dropout", "-"),
        ("valid_nats", "validation", "o-"),
    ):
        values = [line[name] for line in lines]
        axes.plot(millions, values, style, markersize=4, label=label)
    for number, (name, nats) in enumerate(levels.items()):
        color = f"C{number + 2}"
        axes.axhline(nats, color=color, linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="tokens read, in millions", ylabel="loss, in nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    args = read_flags()
    run = json.loads((args.workdir / RUN).read_text("utf-8"))
    train = run["config"]["train"]
    tokens = train["batch_size"] * train["tgt_len"] * train["segments_per_update"]
    lines = curve(read_metrics(args.workdir / METRICS), tokens)
    rows = [{name: run[name] for name in FACTS}, *lines]
    args.log.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    levels = dict(level.rsplit("=", 1) for level in args.level)
    plot(lines, {name: float(nats) for name, nats in levels.items()}, args.picture)
    print(json.dumps(min(lines, key=lambda line: line["valid_nats"])))


if __name__ == "__main__":
    main()
