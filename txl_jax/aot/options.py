"""Options of compilation ahead of time."""

import dataclasses

from txl_jax.fields import at_least, check, one_of


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What to compile ahead of time, and for which TPUs."""

    # The kind of TPU chip, and the number of chips along each axis of the slice.
    topology: str = "v5e:2x4"
    # The number of slices of this topology, joined by the data-center network.
    slices: int = at_least(1, 1)
    # The number of streams per chip, which sets train.batch_size; 0 keeps
    # train.batch_size.
    streams_per_chip: int = at_least(0, 0)
    # The mesh to compile for: "config" is the configured one, "auto" the one with the
    # fewest shards that fits.
    mesh: str = one_of(("config", "auto"), "config")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "compile")
