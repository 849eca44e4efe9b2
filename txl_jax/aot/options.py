"""Options of compilation ahead of time."""

import dataclasses

from txl_jax.fields import Section, at_least, field, one_of


@dataclasses.dataclass(frozen=True)
class CompileConfig(Section, name="compile", modes="train import compile"):
    """Compilation ahead of time: the TPUs and their mesh."""

    topology: str = field(
        "v5e:2x4", help="Kind of TPU chip, and chips along each axis of the slice."
    )
    slices: int = field(
        1, at_least(1), help="Slices, joined by the data-center network."
    )
    mesh: str = field(
        "config",
        one_of(("config", "auto")),
        help='Mesh to compile for; "auto" has the fewest shards that fit.',
    )
