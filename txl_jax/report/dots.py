"""A table's rows as dots with their ranges, one picture.

Dims: none.
"""

from pathlib import Path

from txl_jax.report.plots import empty

Range = tuple[float, float, float]  # mean, least, greatest


def plot_rows(
    title: str, rows: dict[str, tuple[Range, Range, float]], path: Path
) -> None:
    """Draws each row's perplexities with their ranges, the paper's on another axis.

    rows: by name, the perplexity attending as in training, that attending as serves
    best, and the paper's best.
    """
    names = list(rows)
    figure = empty(9, 1.5 + 0.45 * len(names))
    ours, paper = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for y, name in enumerate(names):
        init, best, published = rows[name]
        kinds = (init, y - 0.12, "tab:gray"), (best, y + 0.12, "tab:blue")
        for (mean, *ends), at, color in kinds:
            ours.plot(ends, [at, at], "|-", color=color)
            ours.plot([mean], [at], "o", color=color)
        paper.plot([published], [y], "D", color="black")
    ours.plot([], [], "o", color="tab:gray", label="attention of training")
    ours.plot([], [], "o", color="tab:blue", label="best attention")
    ours.legend(fontsize=8)
    ours.set_yticks(range(len(names)), names, fontsize=8)
    ours.invert_yaxis()
    ours.set(
        xlabel="perplexity here: mean, least and greatest of the seeds", title=title
    )
    paper.set(xlabel="perplexity in the paper (best)")
    for axes in (ours, paper):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
