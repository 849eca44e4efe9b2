"""Options of the paper's ablation tables."""

from dataclasses import dataclass

from txl_jax.runtime.constraint import at_least, check, one_of

TABLES = (6, 7, 10)  # of the paper
SCALES = ("cpu", "full")


@dataclass(frozen=True)
class TableConfig:
    """Which of the paper's tables to reproduce, and at what scale."""

    table: int = one_of(TABLES, 6)  # number of the table in the paper: 6, 7 or 10
    # "cpu" = small models, in hours; "full" = the published configs
    scale: str = one_of(SCALES, "cpu")
    rows: tuple[str, ...] = ()  # names of the rows to run; () = all
    seeds: int = at_least(1, 3)  # runs per row

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "table")
