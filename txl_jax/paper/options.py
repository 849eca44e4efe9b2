"""The rows of the paper's ablations (Tables 6, 7 and 10), and which of them to run.

A row's config is the packaged experiment of the same name. It differs from its parent's
config only in the ablated part.
"""

from dataclasses import dataclass

from txl_jax.errors import UserError, nearest
from txl_jax.fields import at_least, check, field, one_of
from txl_jax.model.config import ModelConfig
from txl_jax.paper.memory_rows import KINDS, MEMORIES, TASKS


@dataclass(frozen=True)
class Row:
    """One row of a table in the paper; numbers that are not given are 0."""

    recurrence: bool
    encoding: str
    loss: str
    init: float  # perplexity at the attention length of training
    best: float  # perplexity at the best attention length
    attention_len: int  # tokens; the shortest length that reaches `best`
    parent: str = ""  # the row that it is compared with


OURS, SHAW = "ours", "Shaw"
VASWANI, AL_RFOU = "Vaswani (absolute)", "Al-Rfou (absolute)"
_FIRST = Row(True, OURS, "full", 27.02, 26.77, 500)
_HALF_LOSS = Row(True, OURS, "half", 28.69, 28.33, 460, "wt103_128m")
_PLAIN = "wt103_no_recurrence"  # the names of the rows without recurrence
_PLAIN_HALF, _PLAIN_SHAW = f"{_PLAIN}_half_loss", f"{_PLAIN}_shaw"

TABLES: dict[str, dict[str, Row]] = {
    "6": {
        "wt103_128m": _FIRST,
        "wt103_shaw": Row(True, SHAW, "full", 27.94, 27.94, 256, "wt103_128m"),
        "wt103_half_loss": _HALF_LOSS,
        _PLAIN: Row(False, OURS, "full", 29.59, 29.02, 260, "wt103_128m"),
        _PLAIN_HALF: Row(False, OURS, "half", 30.10, 30.10, 120, _PLAIN),
        _PLAIN_SHAW: Row(False, SHAW, "full", 29.75, 29.75, 120, _PLAIN),
        f"{_PLAIN_SHAW}_half_loss": Row(
            False, SHAW, "half", 30.50, 30.50, 120, _PLAIN_SHAW
        ),
        "wt103_vaswani": Row(False, VASWANI, "half", 30.97, 30.97, 120, _PLAIN_HALF),
        "wt103_al_rfou": Row(False, AL_RFOU, "half", 31.16, 31.16, 120, _PLAIN_HALF),
        "wt103_151m": Row(True, OURS, "full", 23.43, 23.09, 640, "wt103_128m"),
    },
    "7": {
        "lm1b_300m": Row(True, OURS, "full", 0, 25.2, 0),
        "lm1b_shaw": Row(True, SHAW, "full", 0, 25.7, 0, "lm1b_300m"),
        "lm1b_no_recurrence": Row(False, OURS, "full", 0, 27.1, 0, "lm1b_300m"),
    },
    "10": {
        "wt103_128m": _FIRST,
        "wt103_half_loss": _HALF_LOSS,
        f"{_PLAIN}_176": Row(False, OURS, "full", 28.43, 27.98, 400, "wt103_128m"),
        f"{_PLAIN_HALF}_172": Row(
            False, OURS, "half", 28.83, 28.83, 120, "wt103_half_loss"
        ),
    },
}

ROWS = {name: row for rows in TABLES.values() for name, row in rows.items()}


@dataclass(frozen=True)
class TableConfig:
    """Which of the paper's tables to reproduce, with small models."""

    table: str = field(
        "6",
        one_of((*TABLES, MEMORIES)),
        help='Number of the table, or "memories" for kinds of memory.',
    )
    rows: tuple[str, ...] = field((), help="Rows to run. Empty runs all.")
    seeds: int = field(3, at_least(1), help="Runs per row.")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "table")
        of_memories = self.table == MEMORIES
        known = [*KINDS, *TASKS] if of_memories else [*TABLES[self.table]]
        for name in self.rows:
            if name not in known:
                raise UserError(
                    f"table.rows: Table {self.table} has no row {name!r}"
                    f"{nearest(name, known)}; it has {', '.join(known)}"
                )


@dataclass(frozen=True)
class ReclConfig:
    """Which models to compare on eval.split, and at which context lengths.

    The paper's results are multiples of 100 tokens, hence the default contexts.
    """

    workdirs: tuple[str, ...] = field((), help="Workdirs of the models, of equal size.")
    contexts: tuple[int, ...] = field(
        (100, 1000, 100), help="First and last context length in tokens, and the step."
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "recl")
        first, last, step = contexts = (*self.contexts, 0, 0, 0)[:3]
        valid = len(self.contexts) == 3 and min(contexts) > 0
        if not valid or not step <= last - first < 10_000 * step:
            raise UserError(
                f"recl.contexts = {self.contexts} must be the first length, the last "
                "and the step, of 2 to 10,000 lengths, such as 100,1000,100"
            )

    @property
    def lengths(self) -> list[int]:
        """The context lengths to compare, in tokens."""
        first, last, step = self.contexts
        return list(range(first, last + 1, step))


def refuse_memories(model: ModelConfig, mode: str, *kinds: str) -> None:
    """Raises UserError for a model with one of these kinds of memory."""
    for name in kinds:
        if value := getattr(model, name):
            raise UserError(
                f"model.{name} = {value}: --mode={mode} supports only the paper's "
                "memory"
            )
