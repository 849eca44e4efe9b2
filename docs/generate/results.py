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
    """Returns the validation losses of runs that differ in dropout, and their ends."""
    texts = [(FOLDER / name).read_text("utf-8").splitlines() for name in names]
    runs = [[json.loads(line) for line in lines] for lines in texts]
    updates = [f"{each['updates']:,}" for each in runs[0][1:]]
    rows = [
        (
            run["config"]["model"]["dropout"],
            *(f"{each['valid_nats']:.3f}" for each in validations),
            f"{math.exp(validations[-1]['valid_nats']):.2f}",
            f"{validations[-1]['train_nats']:.3f}",
            f"{validations[-1]['seconds'] / 3600:.1f}",
            f"`{run['git_revision'][:7]}`",
        )
        for run, *validations in runs
    ]
    ends = "perplexity", "training's loss", "hours", "revision"
    return table(("dropout", *updates, *ends), rows)


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
