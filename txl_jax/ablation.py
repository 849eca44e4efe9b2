"""The paper's ablations (Tables 6, 7 and 10): rows, numbers, and how runs compare.

A row's config is a packaged experiment of its name, which differs from its parent's in
the one thing that the row is about.

Dims: none.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from txl_jax import metrics
from txl_jax.errors import UserError, nearest, require, require_one_of


@dataclass(frozen=True)
class Row:
    """One row, and what the paper has for it: perplexities and an attention length.

    0 = not in the paper. `parent` is the row that it is compared with.
    """

    recurrence: bool
    encoding: str
    loss: str
    init: float  # attending as far as in training
    best: float  # attending as far as serves best
    attention_len: int  # tokens; the shortest that reaches `best`
    parent: str = ""


OURS, SHAW, VASWANI, AL_RFOU = (
    "ours",
    "Shaw",
    "Vaswani (absolute)",
    "Al-Rfou (absolute)",
)
_FIRST = Row(True, OURS, "full", 27.02, 26.77, 500)
_HALF = Row(True, OURS, "half", 28.69, 28.33, 460, "wt103_128m")
_ALONE, _ALONE_HALF = "wt103_no_recurrence", "wt103_no_recurrence_half_loss"
_LARGER = Row(True, OURS, "full", 23.43, 23.09, 640, "wt103_128m")

TABLES: dict[int, dict[str, Row]] = {
    6: {
        "wt103_128m": _FIRST,
        "wt103_shaw": Row(True, SHAW, "full", 27.94, 27.94, 256, "wt103_128m"),
        "wt103_half_loss": _HALF,
        _ALONE: Row(False, OURS, "full", 29.59, 29.02, 260, "wt103_128m"),
        _ALONE_HALF: Row(False, OURS, "half", 30.10, 30.10, 120, _ALONE),
        f"{_ALONE}_shaw": Row(False, SHAW, "full", 29.75, 29.75, 120, _ALONE),
        f"{_ALONE}_shaw_half_loss": Row(
            False, SHAW, "half", 30.50, 30.50, 120, f"{_ALONE}_shaw"
        ),
        "wt103_vaswani": Row(False, VASWANI, "half", 30.97, 30.97, 120, _ALONE_HALF),
        "wt103_al_rfou": Row(False, AL_RFOU, "half", 31.16, 31.16, 120, _ALONE_HALF),
        "wt103_151m": _LARGER,
    },
    7: {
        "lm1b_300m": Row(True, OURS, "full", 0, 25.2, 0),
        "lm1b_shaw": Row(True, SHAW, "full", 0, 25.7, 0, "lm1b_300m"),
        "lm1b_no_recurrence": Row(False, OURS, "full", 0, 27.1, 0, "lm1b_300m"),
    },
    10: {
        "wt103_128m": _FIRST,
        "wt103_half_loss": _HALF,
        f"{_ALONE}_176": Row(False, OURS, "full", 28.43, 27.98, 400, "wt103_128m"),
        f"{_ALONE_HALF}_172": Row(
            False, OURS, "half", 28.83, 28.83, 120, "wt103_half_loss"
        ),
    },
}
SCALES = ("cpu", "full")


@dataclass(frozen=True)
class TableConfig:
    """Which table is made, and at what scale."""

    table: int = 6  # of the paper: 6, 7 or 10
    scale: str = "cpu"  # a miniature in hours, or "full", the published configs
    rows: tuple[str, ...] = ()  # names of rows, some of the table's; () = all
    seeds: int = 3  # runs of each row
    steps: int = 0  # updates of each run; 0 = as many as the scale has
    scored: int = 0  # tokens of the split's beginning that are scored; 0 = all

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        if self.table not in TABLES:
            known = ", ".join(map(str, TABLES))
            raise UserError(
                f"table.table = {self.table} is no ablation; known: {known}"
            )
        require_one_of(self.scale, list(SCALES), "table.scale")
        known_rows = list(TABLES[self.table])
        for name in self.rows:
            if name not in known_rows:
                raise UserError(
                    f"table.rows: Table {self.table} has no row {name!r}"
                    f"{nearest(name, known_rows)}; it has {', '.join(known_rows)}"
                )
        require(self, "table", 1, "seeds")
        require(self, "table", 0, "steps", "scored")

    @property
    def chosen(self) -> dict[str, Row]:
        """The rows to be made, in the table's order."""
        rows = TABLES[self.table]
        return {name: rows[name] for name in rows if not self.rows or name in self.rows}


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
    best length saves against the training's.
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
    gain = measure([run[init_len] - run[best_len] for run in runs])
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
                    f"`{name}`: the best attention length instead of the training's",
                    -one.gain.mean,
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
