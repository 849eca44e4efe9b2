"""Options of logs and traces."""

import dataclasses

from txl_jax.fields import TRAINING, Role, Section, field


@dataclasses.dataclass(frozen=True)
class RunConfig(Section, name="run", modes=TRAINING, roles=Role.LOCAL):
    """Logging and profiling."""

    wandb: str = field("", help="Project on Weights & Biases. Empty: off.")
    profile_from: int = field(0, help="First of ten updates to trace. 0 traces none.")
