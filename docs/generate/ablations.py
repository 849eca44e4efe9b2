"""Comparisons of rows of the committed tables, for the paper's three claims."""

import json
from typing import Any

from generate.markdown import ROOT, table
from txl_jax.paper.comparison import Comparison, compare_rows

FOLDER = ROOT / "experiments/ablations/results"

# Committed tables, each written by the mode `table`.
SOURCES = {
    "table6": "Table 6, bytes",
    "table6_words": "Table 6, words",
    "table7": "Table 7, shuffled sentences",
    "table10": "Table 10, bytes",
    "table10_tokens": "Table 10, equal amounts of text",
    "table10_half_tokens": "Table 10, equal amounts of text",
}
# The claims, and the rows that are compared for each, as FILE/ROW.
CLAIMS = {
    "memory helps": (
        ("table6/wt103_no_recurrence", "table6/wt103_128m"),
        ("table6/wt103_no_recurrence_half_loss", "table6/wt103_half_loss"),
        ("table7/lm1b_no_recurrence", "table7/lm1b_300m"),
        ("table10/wt103_no_recurrence_176", "table10/wt103_128m"),
        ("table10/wt103_no_recurrence_half_loss_172", "table10/wt103_half_loss"),
        ("table10_tokens/wt103_no_recurrence_176", "table10/wt103_128m"),
        (
            "table10_half_tokens/wt103_no_recurrence_half_loss_172",
            "table10/wt103_half_loss",
        ),
    ),
    "relative positions are better than others": (
        ("table6/wt103_shaw", "table6/wt103_128m"),
        ("table6/wt103_no_recurrence_shaw", "table6/wt103_no_recurrence"),
        (
            "table6/wt103_no_recurrence_shaw_half_loss",
            "table6/wt103_no_recurrence_half_loss",
        ),
        ("table6/wt103_vaswani", "table6/wt103_no_recurrence_half_loss"),
        ("table6/wt103_al_rfou", "table6/wt103_no_recurrence_half_loss"),
        ("table7/lm1b_shaw", "table7/lm1b_300m"),
    ),
}
LONGER = "attention longer than in training helps"


def read(name: str) -> dict[str, Any]:
    """Returns a committed table."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def compare(row: str, other: str) -> Comparison:
    """Returns the cost of a row against another, FILE/ROW each, seed by seed."""
    (file, name), (other_file, above) = row.split("/"), other.split("/")
    here, there = (
        read(source)["outcomes"][each]["best_by_seed"]
        for source, each in ((file, name), (other_file, above))
    )
    return compare_rows(name, above, here, there)


def claims() -> str:
    """Returns the comparisons for each of the three claims."""
    found = [
        (claim, row.partition("/")[0], compare(row, other))
        for claim, pairs in CLAIMS.items()
        for row, other in pairs
    ]
    compared: set[Comparison] = set()  # tables share runs
    for source in SOURCES:
        for saved in read(source)["comparisons"]:
            one = Comparison(**{name: saved[name] for name in Comparison._fields})
            if "`: attention" in one.what and one not in compared:
                compared.add(one)
                found.append((LONGER, source, one))
    head = ("claim", "in", "change", "cost (ppl)", "spread", "paper", "verdict")
    rows = [
        (
            *(claim, SOURCES[source], one.what),
            *(f"{one.cost:+.3f}", f"{one.spread:.3f}", f"{one.paper:+.2f}"),
            one.verdict,
        )
        for claim, source, one in found
    ]
    return table(head, rows)
