"""What the committed tables say of the paper's three claims."""

from generate.markdown import ROOT, table

FOLDER = ROOT / "experiments/ablations/results"

# The committed tables, each written by the mode `table`.
TABLES = {
    "Table 6, bytes": "table6.md",
    "Table 6, words": "table6_words.md",
    "Table 7, shuffled sentences": "table7.md",
    "Table 10, bytes": "table10.md",
}
# The claims, and the rows whose comparison with another is about each.
CLAIMS = {
    "memory helps": (
        "wt103_no_recurrence",
        "wt103_no_recurrence_176",
        "wt103_no_recurrence_half_loss_172",
        "lm1b_no_recurrence",
    ),
    "relative positions are better than others": (
        "wt103_shaw",
        "wt103_no_recurrence_shaw",
        "wt103_vaswani",
        "wt103_al_rfou",
        "lm1b_shaw",
    ),
}
LONGER = "attention longer than in training helps"
OF = (
    *("wt103_128m", "wt103_half_loss", "wt103_151m"),
    *("wt103_no_recurrence", "wt103_no_recurrence_176"),
)


def comparisons(name: str) -> list[list[str]]:
    """Returns the cells of the lines of a committed table that compare rows."""
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    rows = [[x.strip() for x in line[1:-1].split("|")] for line in lines if "|" in line]
    start = next(i for i, row in enumerate(rows) if row[0] == "change")
    return [row for row in rows[start + 2 :] if len(row) == len(rows[start])]


def claims() -> str:
    """Returns the three claims with what the committed tables say of each."""
    begins = {
        **{claim: [f"`{x}` instead" for x in rows] for claim, rows in CLAIMS.items()},
        LONGER: [f"`{x}`: attention" for x in OF],
    }
    rows: list[list[str]] = []
    for claim, beginnings in begins.items():
        seen: set[str] = set()  # tables share runs
        for source, name in TABLES.items():
            for row in comparisons(name):
                if row[0].startswith(tuple(beginnings)) and row[0] not in seen:
                    seen.add(row[0])
                    rows.append([claim, source, *row])
    head = ("claim", "in", "change", "cost (ppl)", "spread", "paper", "verdict")
    return table(head, rows)
