"""Plots an ablation table with a mean and a range for every row."""

from pathlib import Path

from txl_jax.report.plots import empty
from txl_jax.tables.comparison import RowResult
from txl_jax.tables.rows import Row


def plot_rows(
    title: str, rows: dict[str, Row], results: dict[str, RowResult], path: Path
) -> None:
    """Plots each row's perplexities over its seeds, and the paper's best."""
    names = list(results)
    figure = empty(9, 1.5 + 0.45 * len(names))
    ours, paper = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for y, name in enumerate(names):
        kinds = (
            (results[name].init, y - 0.12, "tab:gray"),
            (results[name].best, y + 0.12, "tab:blue"),
        )
        for ppl, at, color in kinds:
            ours.plot([ppl.least, ppl.most], [at, at], "|-", color=color)
            ours.plot([ppl.mean], [at], "o", color=color)
        paper.plot([rows[name].best], [y], "D", color="black")
    ours.plot([], [], "o", color="tab:gray", label="attention length of training")
    ours.plot([], [], "o", color="tab:blue", label="best attention length")
    ours.legend(fontsize=8)
    ours.set_yticks(range(len(names)), names, fontsize=8)
    ours.invert_yaxis()
    ours.set(xlabel="perplexity here: mean and range over the seeds", title=title)
    paper.set(xlabel="perplexity in the paper (best)")
    for axes in (ours, paper):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
