"""The paper's Figures 3 and 4: what a longer context gains, as PNG."""

from pathlib import Path
from typing import Any

import matplotlib.figure


def plot_recl(result: dict[str, Any], path: Path) -> None:
    """Draws relative gain, gain in perplexity and plain perplexity against context.

    `result` is that of `--mode=recl`. The gains are on the hardest positions, those of
    the smallest ratio; perplexity is over all.
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
    threshold = result["threshold"]
    relative.axhline(threshold, color="gray", linestyle="--", linewidth=1)
    relative.set_yscale("symlog", linthresh=threshold)
    relative.set_ylim(bottom=0)
    relative.set(ylabel="relative gain", title=f"gain by the last step, r = {ratio}")
    absolute.set(ylabel="perplexity", title=f"the same, not normalised, r = {ratio}")
    plain.set(ylabel="perplexity", title="perplexity, all positions")
    relative.legend(fontsize=7)
    for axes in (relative, absolute, plain):
        axes.set_xlabel("context in tokens")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
