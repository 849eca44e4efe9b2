"""Compares the rows of an ablation table over their seeds (Tables 6, 7 and 10)."""

import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_jax import metrics
from txl_jax.paper.options import ROWS, TABLES
from txl_jax.report.plots import empty, save

# A length counts as the best if its perplexity is within 0.01 of 26.77, the last digit
# of the paper's tables.
REACHES = 1 + 0.01 / 26.77


class Measured(NamedTuple):
    """The mean, minimum and maximum of a number over the seeds."""

    mean: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """The maximum minus the minimum."""
        return self.most - self.least


def measure(values: list[float]) -> Measured:
    """Returns the mean and range of one number per seed."""
    return Measured(statistics.fmean(values), min(values), max(values))


class RowResult(NamedTuple):
    """Perplexities of one row over its seeds, at training's and the best length.

    The best attention length is the shortest whose mean perplexity is the best (see
    REACHES). `gain` is the decrease in perplexity within a run from training's length
    to the best length, or 0 if the best length is not longer.
    """

    ppl_init: Measured
    ppl_best: Measured
    init_attention_tokens: int
    best_attention_tokens: int
    ppl_by_attention_tokens: dict[int, Measured]
    gain: Measured
    best_by_seed: list[float]  # at the best attention length


def summarize(nlls: list[dict[int, float]], init_len: int) -> RowResult:
    """Returns a row's result from each seed's nll, in nats, by attention length."""
    runs = [
        {length: metrics.perplexity(nll) for length, nll in run.items()} for run in nlls
    ]
    ppl = {length: measure([run[length] for run in runs]) for length in runs[0]}
    best = min(one.mean for one in ppl.values())
    best_len = min(length for length, one in ppl.items() if one.mean <= best * REACHES)
    longer = max(best_len, init_len)
    gain = measure([run[init_len] - run[longer] for run in runs])
    return RowResult(
        ppl_init=ppl[init_len],
        ppl_best=ppl[best_len],
        init_attention_tokens=init_len,
        best_attention_tokens=best_len,
        ppl_by_attention_tokens=ppl,
        gain=gain,
        best_by_seed=[run[best_len] for run in runs],
    )


class Comparison(NamedTuple):
    """The mean cost of a change in perplexity over the seeds, and maximum - minimum."""

    what: str
    cost: float
    spread: float
    paper: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Tells whether the cost exceeds the spread, and has the paper's sign."""
        if self.seeds < 2:
            return "one seed, so no spread"
        if abs(self.cost) <= self.spread:
            return "no difference"
        if not self.paper:
            return "a difference where the paper has none"
        return "as the paper" if self.cost * self.paper > 0 else "against the paper"


def compare(table: str, results: dict[str, RowResult]) -> list[Comparison]:
    """Compares each row with its parent, and longer attention with training's.

    A row is compared with its nearest ancestor in the results, seed by seed: runs of
    one seed and equal segments read the same text in the same order. Longer attention
    is compared within each run.
    """
    rows, parents, lengths = TABLES[table], [], []
    for name, one in results.items():
        above = rows[name].parent
        while above and above not in results:
            above = rows[above].parent
        if above:
            parent_by_seed = results[above].best_by_seed
            parents.append(compare_rows(name, above, one.best_by_seed, parent_by_seed))
        if rows[name].init:
            init, best = one.init_attention_tokens, one.best_attention_tokens
            what = f"attention to more than training's {init} tokens (best: {best})"
            lost = 0.0 - one.gain.mean  # never -0.0
            paper = round(rows[name].best - rows[name].init, 2)
            seeds = len(one.best_by_seed)
            lengths.append(
                Comparison(f"`{name}`: {what}", lost, one.gain.spread, paper, seeds)
            )
    return parents + lengths


def compare_rows(
    name: str, above: str, by_seed: list[float], above_by_seed: list[float]
) -> Comparison:
    """Compares the best perplexities of two rows, seed by seed."""
    pairs = zip(by_seed, above_by_seed, strict=True)
    cost = measure([here - there for here, there in pairs])
    paper = round(ROWS[name].best - ROWS[above].best, 2)
    what = f"`{name}` instead of `{above}`"
    return Comparison(what, cost.mean, cost.spread, paper, len(by_seed))


def _range(one: Measured) -> str:
    return f"{one.mean:.3f} ({one.least:.3f}–{one.most:.3f})"


def markdown(table: str, results: dict[str, RowResult]) -> str:
    """Returns the table with the paper's numbers, and the comparisons."""
    head = "row|recurrence|encoding|loss|ppl init|ppl best|attention"
    lines = [f"| {head.replace('|', ' | ')} | paper: init | best | attention |"]
    lines.append("|---" * 10 + "|")
    for name, one in results.items():
        row = TABLES[table][name]
        paper = [f"{ppl:.2f}" if ppl else "–" for ppl in (row.init, row.best)]
        cells = [
            f"`{name}`",
            row.recurrence,
            row.encoding,
            row.loss,
            _range(one.ppl_init),
            _range(one.ppl_best),
            str(one.best_attention_tokens),
            *paper,
            str(row.attention_len or "–"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| change | cost (ppl) | spread | paper | verdict |"]
    lines.append("|---" * 5 + "|")
    for each in compare(table, results):
        lines.append(
            f"| {each.what} | {each.cost:+.3f} | {each.spread:.3f} | "
            f"{each.paper:+.2f} | {each.verdict} |"
        )
    return "\n".join(lines) + "\n"


def plot(title: str, table: str, results: dict[str, RowResult], path: Path) -> None:
    """Draws each row's perplexities over its seeds, and the paper's best."""
    figure = empty(9, 1.5 + 0.45 * len(results))
    ours, paper = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    y = np.arange(len(results))
    for kind, shift, color, label in (
        ("ppl_init", -0.12, "tab:gray", "attention length of training"),
        ("ppl_best", 0.12, "tab:blue", "best attention length"),
    ):
        mean, *ends = np.array([getattr(row, kind) for row in results.values()]).T
        ours.plot(ends, [y + shift, y + shift], "|-", color=color)
        ours.plot(mean, y + shift, "o", color=color, label=label)
    paper.plot([TABLES[table][name].best for name in results], y, "kD")
    ours.set_yticks(y, list(results), fontsize=8)
    ours.invert_yaxis()
    ours.set(xlabel="perplexity here: mean and range over the seeds", title=title)
    paper.set(xlabel="perplexity in the paper (best)")
    save(figure, path)
