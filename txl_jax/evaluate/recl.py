"""The relative effective context length of a group of models (section 4.3, App. C).

How long a context helps a model depends on how good it is already, so a gain is
counted against the best that any model of the group does with the shorter context.
Nothing here knows of models: their losses l_i(c, t) are an array.

Dims: I models, C contexts, T positions.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from txl_jax.data.corpora import SPLITS
from txl_jax.errors import UserError, require, require_one_of


@dataclasses.dataclass(frozen=True)
class ReclConfig:
    """Which models to compare, and where and how; the paper's numbers where known.

    The paper gives the threshold and the ratios. Its results are multiples of 100.
    """

    workdirs: tuple[str, ...] = ()  # of the group's models, of equal size
    split: str = "test"  # train, valid or test
    positions: int = 1000  # tokens scored, spread evenly; 0 = all that there are
    start: int = 100  # the first context, in tokens
    step: int = 100  # tokens from one context to the next
    longest: int = 1000  # the last context
    threshold: float = 0.01  # a relative gain below it ends a model's context
    ratios: tuple[float, ...] = (1.0, 0.5, 0.1)  # of the positions, the hardest first
    batch_size: int = 32  # windows read side by side

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "recl", 1, "start", "step", "batch_size")
        require(self, "recl", 0, "positions", "threshold")
        require_one_of(self.split, list(SPLITS), "recl.split")
        if self.longest < self.start + self.step:
            raise UserError(
                f"recl.longest = {self.longest} leaves no gain to measure: it must be "
                f"at least recl.start + recl.step = {self.start + self.step}"
            )
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise UserError(
                f"recl.ratios = {self.ratios} must each be above 0 and at most 1"
            )

    @property
    def contexts(self) -> list[int]:
        """The contexts that losses are needed of, in tokens."""
        return list(range(self.start, self.longest + 1, self.step))


class Gains(NamedTuple):
    """Perplexities on the hardest positions, from each context to the next.

    baseline_C: exp f(c, c), the group's best with the shorter context, the same for all
    models. longer_IC: exp f_i(c, c'), where model i alone has the longer. There is one
    column less than there are contexts.
    """

    baseline_C: np.ndarray
    longer_IC: np.ndarray

    @property
    def relative_IC(self) -> np.ndarray:
        """g_i(c, c'), the gain as a share of the baseline."""
        return self.absolute_IC / self.baseline_C

    @property
    def absolute_IC(self) -> np.ndarray:
        """exp f(c, c) - exp f_i(c, c'), of the paper's Figure 3."""
        return self.baseline_C - self.longer_IC


def hardest(baseline_T: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the positions with the largest baseline: that share of all, at least one.

    Of equal ones the earlier.
    """
    count = max(round(ratio * len(baseline_T)), 1)
    return np.argsort(-baseline_T, kind="stable")[:count]


def gains(nll_ICT: np.ndarray, ratio: float) -> Gains:
    """Returns what each model gains by each longer context, in perplexity.

    With b(c, t) = min_i l_i(c, t) in nats, f_i(c, c') is the mean over the hardest
    positions of min(b(c, t), l_i(c', t)): a longer context never hurts.
    """
    baselines, longer = [], []
    for now_IT, next_IT in zip(
        nll_ICT.swapaxes(0, 1), nll_ICT.swapaxes(0, 1)[1:], strict=False
    ):
        b_T = now_IT.min(axis=0)
        chosen = hardest(b_T, ratio)
        baselines.append(b_T[chosen].mean())
        longer.append(np.minimum(b_T, next_IT)[:, chosen].mean(axis=1))
    return Gains(np.exp(np.array(baselines)), np.exp(np.array(longer)).T)


def recl(
    nll_ICT: np.ndarray, contexts: list[int], ratio: float, threshold: float
) -> list[tuple[int, bool]]:
    """Returns each model's effective context, and whether it ended there.

    From the first context on: if the gain to the next is below the threshold, this is
    it. The last context has no next: it is then the least that it can be. (The paper's
    "go to step 1" is a slip for step 2: it would begin anew.)
    """
    found = []
    for relative_C in gains(nll_ICT, ratio).relative_IC:
        below = np.flatnonzero(relative_C < threshold)
        found.append(
            (contexts[below[0]], True) if len(below) else (contexts[-1], False)
        )
    return found
