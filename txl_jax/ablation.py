"""The paper's ablations (Tables 6, 7 and 10): their rows and its numbers.

A row's config is a packaged experiment of its name, which differs from its parent's in
the one thing that the row is about.

Dims: none.
"""

from dataclasses import dataclass

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
