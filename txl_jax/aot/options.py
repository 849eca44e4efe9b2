"""Options of compilation ahead of time."""

import dataclasses

from txl_jax.fields import at_least, check, field, one_of


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What to compile ahead of time, and for which TPUs."""

    topology: str = field(
        "v5e:2x4",
        help="Kind of TPU chip, and the number of chips along each axis of the slice.",
    )
    slices: int = field(
        1,
        at_least(1),
        help="Slices of this topology, joined by the data-center network.",
    )
    mesh: str = field(
        "config",
        one_of(("config", "auto")),
        help='Mesh to compile for: the configured one, or "auto" for the one with the '
        "fewest shards that fits.",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "compile")
