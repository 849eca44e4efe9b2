"""What the committed run of the ablations says of the paper's three claims."""

from generate.markdown import ROOT, table

RESULTS = ROOT / "experiments/ablations/results_cpu.md"

# The claims, and the rows whose comparison with another is about each.
CLAIMS = {
    "memory helps": ("wt103_no_recurrence",),
    "relative positions are better than others": (
        "wt103_shaw",
        "wt103_no_recurrence_shaw",
        "wt103_vaswani",
        "wt103_al_rfou",
    ),
}
LONGER = "attention longer than in training helps"
OF = ("wt103_128m", "wt103_151m")


def comparisons() -> list[list[str]]:
    """Returns the cells of the lines that compare rows."""
    lines = RESULTS.read_text("utf-8").splitlines()
    rows = [[x.strip() for x in line[1:-1].split("|")] for line in lines if "|" in line]
    start = next(i for i, row in enumerate(rows) if row[0] == "change")
    return [row for row in rows[start + 2 :] if len(row) == len(rows[start])]


def claims() -> str:
    """Returns the three claims with what the newest committed run says of each."""
    begins = {
        **{claim: [f"`{x}` instead" for x in rows] for claim, rows in CLAIMS.items()},
        LONGER: [f"`{x}`: attention" for x in OF],
    }
    rows = [
        [claim, *row]
        for claim, beginnings in begins.items()
        for row in comparisons()
        if row[0].startswith(tuple(beginnings))
    ]
    head = ("claim", "change", "costs (ppl)", "spread", "paper", "verdict")
    return table(head, rows)
