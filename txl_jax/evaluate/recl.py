"""The relative effective context length (RECL) of several models (section 4.3, App. C).

A good model gains less from a longer context, so every gain is relative to the best
loss of all compared models with the shorter context. The losses l_i(c, t) of model i at
position t with a context of c tokens are given as an array.

Dims: I models, C contexts, T positions.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np

# The paper's numbers (Appendix C).
THRESHOLD = 0.01  # a smaller relative gain ends a model's context
RATIOS = (1.0, 0.5, 0.1)  # shares of the positions, the hardest first
TICKS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]  # of the plotted gains


class Gains(NamedTuple):
    """Perplexities on the hardest positions, and gains from each context to the next.

    There is one column fewer than there are contexts.
    """

    baseline_C: np.ndarray  # exp f(c, c): the best of all with the shorter context
    absolute_IC: np.ndarray  # exp f(c, c) - exp f_i(c, c'), as in Figure 3
    relative_IC: np.ndarray  # g_i(c, c'), the gain as a share of the baseline


def hardest(baseline_T: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the given share of positions, those with the largest baseline.

    There is at least one. Ties keep their order.
    """
    count = max(round(ratio * len(baseline_T)), 1)
    return np.argsort(-baseline_T, kind="stable")[:count]


def gains(nll_ICT: np.ndarray, ratio: float) -> Gains:
    """Returns each model's gain in perplexity from each longer context.

    With b(c, t) = min_i l_i(c, t) in nats, f_i(c, c') is the mean over the hardest
    positions of min(b(c, t), l_i(c', t)): a longer context never hurts.
    """
    baselines, longer = [], []
    for now_IT, next_IT in itertools.pairwise(nll_ICT.swapaxes(0, 1)):
        b_T = now_IT.min(axis=0)
        chosen = hardest(b_T, ratio)
        baselines.append(b_T[chosen].mean())
        longer.append(np.minimum(b_T, next_IT)[:, chosen].mean(axis=1))
    baseline_C = np.exp(np.array(baselines))
    absolute_IC = baseline_C - np.exp(np.array(longer)).T
    return Gains(baseline_C, absolute_IC, absolute_IC / baseline_C)


def recl(
    nll_ICT: np.ndarray, contexts: list[int], ratio: float, threshold: float
) -> list[tuple[int, bool]]:
    """Returns each model's effective context, and whether the gains ended there.

    The effective context is the first one from which the gain to the next is below the
    threshold. If no gain is, it is the last context, a lower bound. (The paper's "go to
    step 1" must mean step 2: step 1 would start over.)
    """
    lengths = []
    for relative_C in gains(nll_ICT, ratio).relative_IC:
        below = np.flatnonzero(relative_C < threshold)
        ended = len(below) > 0
        lengths.append((contexts[below[0] if ended else -1], ended))
    return lengths


def plot_recl(result: dict[str, Any], path: Path) -> None:
    """Plots the paper's Figures 3 and 4: gains from a longer context, and perplexities.

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
    relative_gains = [row["relative_gain"][ratio] for row in result["members"]]
    threshold = result["threshold"]
    relative.axhline(threshold, color="gray", linestyle="--", linewidth=1)
    # The scale is linear below the threshold and logarithmic above it.
    relative.set_yscale("symlog", linthresh=threshold)
    relative.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
    relative.set_ylim(0, 1.2 * max([threshold, *itertools.chain(*relative_gains)]))
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
