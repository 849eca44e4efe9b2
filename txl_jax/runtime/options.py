"""Options of processes, logs and the mesh of devices."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import READING, TRAINING, at_least, between, check, field


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run uses its machines; no result depends on it."""

    # The time in seconds without progress after which a run counts as hung and exits. 0
    # sets no limit.
    hang_seconds: int = at_least(0, 1_800)
    # The folder of compiled programs, local or on gs://. Empty takes the user's cache
    # folder, and "off" keeps none.
    compilation_cache: str = field("", modes=f"{TRAINING} {READING} prepare export")
    # The project on Weights & Biases to log to (extra `wandb`). Empty logs to none.
    wandb: str = ""
    # The range of updates to trace: "10:15" traces 11 to 15. Empty traces none.
    profile_steps: str = ""
    # The port of jax's profiler server, to which process i adds i. 0 starts no server.
    profiler_port: int = between(0, 2**16 - 1, 0)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "run")
        self.profiled()

    def profiled(self) -> tuple[int, int]:
        """Returns the updates before and at the end of the trace; (-1, -1) for none."""
        if not self.profile_steps:
            return -1, -1
        first, _, last = self.profile_steps.partition(":")
        if first.isdecimal() and last.isdecimal() and int(first) < int(last):
            return int(first), int(last)
        raise UserError(
            f"run.profile_steps = {self.profile_steps!r} must be a range of updates, "
            'such as "10:15"'
        )
