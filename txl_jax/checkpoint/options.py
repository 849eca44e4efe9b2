"""Options of checkpoints: the interval, retention, and the names of checkpoints."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import at_least, check, field

NAMES = ("best", "latest")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep; every validated step is saved."""

    every_steps: int = field(
        4_000, at_least(1), help="Updates between two checkpoints."
    )
    keep: int = field(
        2, at_least(1), help="Newest checkpoints to keep, besides the best one."
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "checkpoint")


def check_which(which: str, field: str) -> None:
    """Raises UserError for a name that no checkpoint can have."""
    is_step = which.isdecimal() and len(which) < 20
    if which not in NAMES and not is_step:
        raise UserError(f"{field} = {which[:80]!r} is neither best, latest nor a step")
