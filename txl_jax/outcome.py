"""How the runs of an ablation table's rows compare, over seeds (Tables 6, 7 and 10).

Dims: none.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from txl_jax import metrics
from txl_jax.ablation import TABLES


@dataclass(frozen=True)
class Measured:
    """A number over the seeds: their mean, least and greatest."""

    mean: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """The greatest less the least."""
        return self.most - self.least


def measure(values: list[float]) -> Measured:
    """Returns the mean of one number per seed, and its range."""
    return Measured(statistics.fmean(values), min(values), max(values))


# A length reaches the best when it is worse by less than the paper's tables could show:
# 0.01 of 26.77, in parts of the perplexity.
REACHES = 1 + 0.01 / 26.77


@dataclass(frozen=True)
class Outcome:
    """What the runs of one row gave.

    `ppl` is by attention length; `gain` is, in the same run, the perplexity that the
    best length saves against the training's, 0 where that is no longer.
    """

    ppl: dict[int, Measured]
    init_len: int
    best_len: int
    gain: Measured
    seeds: int

    @property
    def init(self) -> Measured:
        """The perplexity attending as far as in training."""
        return self.ppl[self.init_len]

    @property
    def best(self) -> Measured:
        """The perplexity at `best_len`."""
        return self.ppl[self.best_len]


def summarise(nlls: list[dict[int, float]], init_len: int) -> Outcome:
    """Returns the outcome of a row: of each seed, nats per token by attention length.

    init_len is how far training attended; best_len is the shortest length whose mean
    perplexity reaches the best of all.
    """
    runs = [
        {length: metrics.perplexity(nll) for length, nll in run.items()} for run in nlls
    ]
    ppl = {length: measure([run[length] for run in runs]) for length in runs[0]}
    best = min(one.mean for one in ppl.values())
    best_len = min(length for length, one in ppl.items() if one.mean <= best * REACHES)
    longer = max(best_len, init_len)
    gain = measure([run[init_len] - run[longer] for run in runs])
    return Outcome(ppl, init_len, best_len, gain, len(runs))


@dataclass(frozen=True)
class Comparison:
    """What one change costs: perplexity here, its spread, and the paper's number."""

    what: str
    cost: float
    spread: float
    paper: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the change matters here, and points where the paper's does.

        Less than the spread over the seeds is no difference.
        """
        if self.seeds < 2:
            return "one seed: no spread to judge by"
        if abs(self.cost) <= self.spread:
            return "no difference"
        if not self.paper:
            return "a difference where the paper has none"
        return "as the paper" if self.cost * self.paper > 0 else "against the paper"


def ancestor(name: str, table: int, present: dict[str, Any]) -> str:
    """Returns the nearest row above `name` that is present, or ""."""
    rows = TABLES[table]
    above = rows[name].parent
    while above and above not in present:
        above = rows[above].parent
    return above


def compare(table: int, outcomes: dict[str, Outcome]) -> list[Comparison]:
    """Returns each row against its parent, and longer attention against training's.

    A row's cost is its best perplexity less its parent's, or the nearest row's above
    that was made; the spread is the greater of the two rows'. Longer attention is
    compared within each run.
    """
    rows, found = TABLES[table], []
    for name, one in outcomes.items():
        if above := ancestor(name, table, outcomes):
            other = outcomes[above]
            found.append(
                Comparison(
                    f"`{name}` instead of `{above}`",
                    one.best.mean - other.best.mean,
                    max(one.best.spread, other.best.spread),
                    round(rows[name].best - rows[above].best, 2),
                    min(one.seeds, other.seeds),
                )
            )
    for name, one in outcomes.items():
        if rows[name].init:
            found.append(
                Comparison(
                    f"`{name}`: attention to more than the training's {one.init_len} "
                    f"tokens (best: {one.best_len})",
                    0.0 - one.gain.mean,
                    one.gain.spread,
                    round(rows[name].best - rows[name].init, 2),
                    one.seeds,
                )
            )
    return found


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as what main prints; a range is [mean, least, greatest]."""
    by_length = {
        str(length): list(dataclasses.astuple(one))
        for length, one in outcome.ppl.items()
    }
    return {
        "ppl_init": list(dataclasses.astuple(outcome.init)),
        "ppl_best": list(dataclasses.astuple(outcome.best)),
        "init_attention_tokens": outcome.init_len,
        "best_attention_tokens": outcome.best_len,
        "ppl_by_attention_tokens": by_length,
        "seeds": outcome.seeds,
    }


def _range(one: Measured) -> str:
    return f"{one.mean:.3f} ({one.least:.3f}–{one.most:.3f})"


def _paper(number: float, form: str = ".2f") -> str:
    return f"{number:{form}}" if number else "–"


def markdown(table: int, outcomes: dict[str, Outcome]) -> str:
    """Returns the table with the paper's numbers beside, and the comparisons."""
    lines = [
        "| row | recurrence | encoding | loss | ppl init | ppl best | attention | "
        "paper: init | best | attention |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in outcomes.items():
        row = TABLES[table][name]
        cells = [
            f"`{name}`",
            "yes" if row.recurrence else "no",
            row.encoding,
            row.loss,
            _range(one.init),
            _range(one.best),
            str(one.best_len),
            _paper(row.init),
            _paper(row.best),
            _paper(row.attention_len, "d"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| change | costs (ppl) | spread | paper | verdict |",
        "|---|---|---|---|---|",
    ]
    for each in compare(table, outcomes):
        lines.append(
            f"| {each.what} | {each.cost:+.3f} | {each.spread:.3f} | "
            f"{each.paper:+.2f} | {each.verdict} |"
        )
    return "\n".join(lines) + "\n"
