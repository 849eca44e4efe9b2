"""The paper's Figures 3 and 4: gains from a longer context."""

from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib.figure

TICKS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]


def plot_recl(result: dict[str, Any], path: Path) -> None:
    """Plots the relative gain, the gain in perplexity and the perplexity by context.

    `result` is the JSON of `--mode=recl`. The gains are over the hardest positions (the
    smallest ratio), the perplexity is over all positions.
    """
    ratio = min(result["group_ppl"], key=float)
    contexts = result["contexts_tokens"]
    figure = matplotlib.figure.Figure(figsize=(10.5, 3.6), layout="constrained")
    relative, absolute, plain = figure.subplots(1, 3)
    for row in result["members"]:
        label = f"{row['name']} (RECL {row['recl_tokens'][ratio]})"
        relative.plot(contexts[1:], row["relative_gain"][ratio], ".-", label=label)
        absolute.plot(contexts[1:], row["ppl_gain"][ratio], ".-", label=label)
        plain.plot(contexts, row["ppl"], ".-", label=row["name"])
    gains = [row["relative_gain"][ratio] for row in result["members"]]
    threshold = result["threshold"]
    relative.axhline(threshold, color="gray", linestyle="--", linewidth=1)
    # The scale is linear below the threshold and logarithmic above it.
    relative.set_yscale("symlog", linthresh=threshold)
    relative.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
    relative.set_ylim(0, 1.2 * max([threshold, *chain(*gains)]))
    relative.set(
        ylabel="relative gain", title=f"gain from the previous context, r = {ratio}"
    )
    absolute.set(ylabel="perplexity", title=f"absolute gain, r = {ratio}")
    plain.set(ylabel="perplexity", title="perplexity, all positions")
    handles, labels = relative.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8
    )
    for axes in (relative, absolute, plain):
        axes.set_xlabel("context in tokens")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
