"""The relative effective context length (RECL) of several models (section 4.3, App. C).

A good model gains less from a longer context, so every gain is relative to the best
loss of all compared models with the shorter context. l_i(c, t) is the loss of model i
on the token at position t after a context of exactly c tokens, in nats.

Dims: I models, C contexts, T positions.
"""

import itertools
from pathlib import Path

import numpy as np

from txl_jax.report.log import Json
from txl_jax.report.plots import empty, save

# The paper's numbers (Appendix C).
THRESHOLD = 0.01  # a smaller relative gain ends a model's context
RATIOS = (1.0, 0.5, 0.1)  # shares of the positions, the hardest first
TICKS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]  # of the plotted gains


def hardest(baseline_T: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the share of positions with the largest baseline, at least one."""
    count = max(round(ratio * len(baseline_T)), 1)
    return np.argsort(-baseline_T, kind="stable")[:count]


def gains(nll_ICT: np.ndarray, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (baseline_C, gain_IC) of each context but the last, in perplexity.

    With b(c, t) = min_i l_i(c, t) in nats, f_i(c, c') is the mean over the hardest
    positions of min(b(c, t), l_i(c', t)): a longer context never hurts. The baseline is
    exp f(c, c), the gain exp f(c, c) - exp f_i(c, c'), as in Figure 3.
    """
    baselines, longer = [], []
    for now_IT, next_IT in itertools.pairwise(nll_ICT.swapaxes(0, 1)):
        b_T = now_IT.min(axis=0)
        chosen = hardest(b_T, ratio)
        baselines.append(b_T[chosen].mean())
        longer.append(np.minimum(b_T, next_IT)[:, chosen].mean(axis=1))
    baseline_C = np.exp(np.array(baselines))
    return baseline_C, baseline_C - np.exp(np.array(longer)).T


def recl(relative_C: np.ndarray, contexts: list[int]) -> tuple[int, bool]:
    """Returns a model's effective context, and whether its gains ended there.

    relative_C: its gains as shares of the baseline, g_i(c, c'). The effective context
    is the first one from which the gain to the next is below THRESHOLD. If no gain is,
    it is the last context, a lower bound. (The paper's "go to step 1" must mean step 2:
    step 1 would start over.)
    """
    below = np.flatnonzero(relative_C < THRESHOLD)
    ended = len(below) > 0
    return contexts[below[0] if ended else -1], ended


def compare(nll_ICT: np.ndarray, contexts: list[int], rows: list[Json]) -> Json:
    """Returns RECL in tokens and the gains; rows: what is known of each model."""
    columns = ("recl_tokens", "ended", "relative_gain", "ppl_gain")
    members = [{**row, **{name: {} for name in columns}} for row in rows]
    baselines: dict[str, list[float]] = {}
    for ratio in RATIOS:
        key = f"{ratio:g}"
        baseline_C, gain_IC = gains(nll_ICT, ratio)
        relative_IC = gain_IC / baseline_C
        baselines[key] = baseline_C.tolist()
        for i, row in enumerate(members):
            length, row["ended"][key] = recl(relative_IC[i], contexts)
            # The effective context cannot exceed what the model can read.
            row["recl_tokens"][key] = min(length, row["full_context_tokens"] or length)
            row["relative_gain"][key] = relative_IC[i].tolist()
            row["ppl_gain"][key] = gain_IC[i].tolist()
    for row, nll_CT in zip(members, nll_ICT, strict=True):
        row["ppl"] = np.exp(nll_CT.mean(axis=1)).tolist()
    return {"group_ppl": baselines, "members": members}


def plot_recl(result: Json, path: Path) -> None:
    """Draws the paper's Figures 3 (of the smallest ratio) and 4."""
    ratio = min(result["group_ppl"], key=float)
    contexts = result["contexts_tokens"]
    figure = empty(10.5, 3.6)
    relative, absolute, plain = figure.subplots(1, 3)
    for row in result["members"]:
        label = f"{row['workdir']} (RECL {row['recl_tokens'][ratio]})"
        relative.plot(contexts[1:], row["relative_gain"][ratio], ".-", label=label)
        absolute.plot(contexts[1:], row["ppl_gain"][ratio], ".-")
        plain.plot(contexts, row["ppl"], ".-")
    relative_gains = [row["relative_gain"][ratio] for row in result["members"]]
    relative.axhline(THRESHOLD, color="gray", linestyle="--", linewidth=1)
    # The scale is linear below the threshold and logarithmic above it.
    relative.set_yscale("symlog", linthresh=THRESHOLD)
    relative.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
    relative.set_ylim(0, 1.2 * max([THRESHOLD, *itertools.chain(*relative_gains)]))
    title = f"gain from the previous context, r = {ratio}"
    relative.set(ylabel="relative gain", title=title)
    absolute.set(ylabel="perplexity", title=f"absolute gain, r = {ratio}")
    plain.set(ylabel="perplexity", title="perplexity, all positions")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    for axes in (relative, absolute, plain):
        axes.set_xlabel("context in tokens")
        axes.title.set_fontsize(9)
    save(figure, path)
