"""Options of the mesh of devices."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import WITH_MODEL, Role, Section, at_least, field


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, name="mesh", modes=WITH_MODEL, roles=Role.LOCAL):
    """Devices along each axis of the mesh; one field may be -1, the remaining ones."""

    data: int = field(
        -1, at_least(-1), help="Copies of the model, each with its own streams."
    )
    fsdp: int = field(
        1,
        at_least(-1),
        help="Devices that share one copy of the parameters; each reads its own "
        "streams.",
    )
    model: int = field(
        1, at_least(-1), help="Shards of heads, feed-forward and vocabulary."
    )

    def __post_init__(self) -> None:
        """Raises UserError for sizes that fit no number of devices."""
        super().__post_init__()
        sizes = [self.data, self.fsdp, self.model]
        if 0 in sizes or sizes.count(-1) > 1:
            raise UserError(
                f"mesh.data, mesh.fsdp, mesh.model = {sizes}: each must be at least "
                "1, and one of them may be -1 (the remaining devices)"
            )
