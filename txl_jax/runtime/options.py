"""Options of processes, logs and the mesh of devices."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import between, check, field


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run uses its machines; no result depends on it."""

    compilation_cache: str = field(
        "",
        help="Folder of compiled programs, local or on gs://. Empty takes the user's "
        'cache folder, and "off" keeps none.',
    )
    wandb: str = field(
        "", help="Project on Weights & Biases (extra `wandb`). Empty logs to none."
    )
    profile_steps: str = field(
        "", help='Updates to trace: "10:15" traces 11 to 15. Empty traces none.'
    )
    profiler_port: int = field(
        0,
        between(0, 2**16 - 1),
        help="Port of jax's profiler server, to which process i adds i. 0 starts no "
        "server.",
    )

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
