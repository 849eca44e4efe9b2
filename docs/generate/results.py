"""The committed logs of the reference model and of RECL, as tables."""

import json
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
