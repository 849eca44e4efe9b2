"""Options of checkpoints: the interval, how many are kept, and their names."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import TRAINING, Role, Section, at_least, field


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint", modes=TRAINING, roles=Role.LOCAL):
    """When to save and how many to keep; every validated step is saved."""

    every_steps: int = field(4_000, at_least(1), help="Updates between checkpoints.")
    keep: int = field(2, at_least(1), help="Newest checkpoints kept, besides the best.")


def check_which(which: str, name: str) -> None:
    """Constrains a field that selects a checkpoint."""
    is_step = which.isdecimal() and len(which) < 20
    if which not in ("best", "latest") and not is_step:
        raise UserError(f"{name} = {which[:80]!r} is neither best, latest nor a step")
