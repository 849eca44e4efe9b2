"""Options of the mesh of devices."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import check


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1, in at most one field, = the rest."""

    # The number of copies of the model, each with different streams. -1 takes the
    # remaining devices.
    data: int = -1
    # The number of shards of the parameters, each with different streams. -1 takes the
    # remaining devices.
    fsdp: int = 1
    # The number of shards of the heads, the feed-forward and the vocabulary. -1 takes
    # the remaining devices.
    model: int = 1
    # The number of consecutive pieces of the text that a call reads, each on other
    # devices. -1 takes the remaining devices.
    segments: int = 1

    def __post_init__(self) -> None:
        """Raises UserError for sizes that fit no number of devices."""
        check(self, "mesh")
        sizes = [self.data, self.fsdp, self.model, self.segments]
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise UserError(
                f"mesh.data, mesh.fsdp, mesh.model, mesh.segments = {sizes}: each must "
                "be at least 1, and one of them may be -1 (the remaining devices)"
            )
