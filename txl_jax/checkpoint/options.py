"""Options of checkpoints: the interval, how many are kept, and their names."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import at_least, check, field


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep; every validated step is saved."""

    every_steps: int = field(4_000, at_least(1), help="Updates between checkpoints.")
    keep: int = field(2, at_least(1), help="Newest checkpoints kept, besides the best.")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "checkpoint")


def check_which(which: str, name: str) -> None:
    """Constrains a field that selects a checkpoint."""
    is_step = which.isdecimal() and len(which) < 20
    if which not in ("best", "latest") and not is_step:
        raise UserError(f"{name} = {which[:80]!r} is neither best, latest nor a step")
