"""The relative effective context length (RECL) of several models (section 4.3, App. C).

A good model gains less from a longer context, so every gain is relative to the best
loss of all compared models with the shorter context. The losses l_i(c, t) of model i at
position t with a context of c tokens are given as an array.

Dims: I models, C contexts, T positions.
"""

import itertools
from typing import NamedTuple

import numpy as np

# The paper's numbers (Appendix C).
THRESHOLD = 0.01  # a smaller relative gain ends a model's context
RATIOS = (1.0, 0.5, 0.1)  # shares of the positions, the hardest first


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
