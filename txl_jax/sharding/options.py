"""Options of the mesh of devices."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import at_least, check, field


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1, in at most one field, = the rest."""

    data: int = field(
        -1, at_least(-1), help="Copies of the model, each with different streams."
    )
    fsdp: int = field(
        1, at_least(-1), help="Shards of the parameters, each with different streams."
    )
    model: int = field(
        1,
        at_least(-1),
        help="Shards of the heads, the feed-forward and the vocabulary.",
    )
    segments: int = field(
        1, at_least(-1), help="Consecutive pieces of the text that a call reads."
    )

    def __post_init__(self) -> None:
        """Raises UserError for sizes that fit no number of devices."""
        check(self, "mesh")
        sizes = [self.data, self.fsdp, self.model, self.segments]
        if 0 in sizes or sizes.count(-1) > 1:
            raise UserError(
                f"mesh.data, mesh.fsdp, mesh.model, mesh.segments = {sizes}: each must "
                "be at least 1, and one of them may be -1 (the remaining devices)"
            )
