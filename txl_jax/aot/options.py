"""Options of compilation ahead of time."""

import dataclasses

from txl_jax.runtime.constraint import at_least, check, one_of


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What to compile ahead of time, and for which TPUs or GPUs."""

    # kind of chip, and chips along each axis of the slice, or GPUs: h100:8
    topology: str = "v5e:2x4"
    slices: int = at_least(1, 1)  # of this topology, joined by the data-center network
    # streams per chip, which set train.batch_size; 0 = train.batch_size is unchanged,
    # -1 = the most that fit, up to 512
    streams_per_chip: int = at_least(-1, 0)
    # find the remat policy, mesh and, unless given, number of streams with the most
    # tokens per second
    search: bool = False
    # "config" = the configured mesh, "auto" = the one with the fewest shards that fits
    mesh: str = one_of(("config", "auto"), "config")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "compile")
