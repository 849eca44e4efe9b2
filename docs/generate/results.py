"""The committed logs of the reference model and of RECL, as tables."""

import json
import math
from pathlib import Path
from typing import Any

from generate.markdown import ROOT, table

FOLDER = ROOT / "experiments/logs"


def read(name: str) -> dict[str, Any]:
    """Returns a committed result."""
    return json.loads((FOLDER / name).read_text("utf-8"))


def sweep(name: str) -> str:
    """Returns the perplexity of each value of a sweep."""
    result = read(name)
    field = result["sweep"]
    lines = [(row[field], f"{row['ppl']:.2f}") for row in result["rows"]]
    return table((f"`{field}`", "perplexity"), lines)


def dropout(*names: str) -> str:
    """Returns the validation losses of runs that differ in dropout, and their hours."""
    columns: list[list[str]] = []
    updates: list[str] = []
    for name in names:
        lines = (FOLDER / name).read_text("utf-8").splitlines()
        run, *validations = map(json.loads, lines)
        last, revision = validations[-1], run["git_revision"][:7]
        updates = [f"{each['updates']:,} updates" for each in validations]
        columns.append(
            [
                str(run["config"]["model"]["dropout"]),
                *(f"{each['valid_nats']:.3f}" for each in validations),
                f"{math.exp(last['valid_nats']):.2f}",
                f"{last['train_nats']:.3f}",
                f"{last['seconds'] / 3600:.1f}",
                f"`{revision}`",
            ]
        )
    ends = "perplexity at the end", "training's loss there", "hours", "revision"
    labels = "dropout", *updates, *ends
    head, *rows = zip(labels, *columns, strict=True)
    return table(head, list(rows))


def recl(*names: str) -> str:
    """Returns RECL by model and share of the positions, one number for each seed."""
    found: dict[str, list[dict[str, int]]] = {}
    for member in (each for name in names for each in read(name)["members"]):
        row = Path(member["workdir"]).parent.name
        found.setdefault(row, []).append(member["recl_tokens"])
    shares = "0.1", "0.5", "1"
    lines = [
        (f"`{row}`", *(", ".join(str(one[share]) for one in seeds) for share in shares))
        for row, seeds in found.items()
    ]
    return table(("model", *(f"r = {share}" for share in shares)), lines)
