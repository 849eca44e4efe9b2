"""Where every array lives: a mesh, and one table from dimensions to its axes.

Dims: as in the glossary of `txl_jax`; a letter that RULES does not name is replicated.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.errors import UserError

AXES = ("data", "fsdp", "model")

# Streams are split over data and fsdp alike; parameters over fsdp (all chips of one
# fsdp group hold one copy between them) and, within a layer, over model.
RULES = (
    ("B", ("data", "fsdp")),
    ("D", "fsdp"),
    ("E", "fsdp"),  # where D has not taken it
    ("H", "model"),
    ("F", "model"),
    ("V", "model"),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; -1, in one of them at most, = the rest."""

    data: int = -1  # copies of the model, each with its own streams
    fsdp: int = 1  # shards of the parameters, each with its own streams
    model: int = 1  # shards of heads, feed-forward and vocabulary

    def __post_init__(self) -> None:
        """Refuses sizes that no number of devices has."""
        sizes = [getattr(self, axis) for axis in AXES]
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise UserError(
                f"mesh.data, mesh.fsdp, mesh.model = {sizes}: each must be at least 1, "
                "and one of them may be -1 (the devices that are left)"
            )


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (all of them by default).

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    filled = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(filled) != len(devices):
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.model = {sizes} does not fit "
            f"{len(devices)} devices; set one of them to -1"
        )
    # Neighbours in the mesh are neighbours on the chips' torus, whose axes are split
    # where no set of them has the size: jax.make_mesh would refuse.
    placed = mesh_utils.create_device_mesh(
        filled, devices, allow_split_physical_axes=True
    )
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(mesh: Mesh, letters: Iterable[str | None]) -> NamedSharding:
    """Returns the sharding of an array whose dimensions are `letters`.

    A mesh axis splits one dimension at most: the first that RULES gives it to.
    """
    spec = nn.logical_to_mesh_axes(tuple(letters), RULES) or PartitionSpec()
    return NamedSharding(mesh, spec)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns the shardings of a pytree of PartitionSpecs of letters."""
    return jax.tree.map(
        lambda spec: sharding(mesh, spec),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def stream_shards(mesh: Mesh) -> int:
    """Returns how many shards the streams are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def place_segments(mesh: Mesh, segments: Any) -> Any:
    """Returns host arrays [S, B, ..] of this process's streams on the devices."""
    # Among several processes jax takes this for a transfer that nobody meant.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(
                sharding(mesh, "SBL"[: x.ndim]), x
            ),
            segments,
        )


def check_streams(mesh: Mesh, batch_size: int, field: str) -> None:
    """Raises UserError, naming the config's field, unless the streams divide."""
    shards = stream_shards(mesh)
    if batch_size % shards:
        raise UserError(
            f"{field} = {batch_size} does not divide over mesh.data x mesh.fsdp = "
            f"{shards} shards: make it a multiple of {shards}, or raise mesh.model"
        )


def host_rows(mesh: Mesh, batch_size: int, field: str) -> slice:
    """Returns the streams whose batches this process feeds, by the sharding's own map.

    Raises UserError, naming the config's `field`, when the streams do not divide over
    the mesh, or when this process's are not contiguous.
    """
    check_streams(mesh, batch_size, field)
    places = sharding(mesh, "B").addressable_devices_indices_map((batch_size,))
    starts = sorted(
        {place[0].indices(batch_size)[:2] for place in places.values() if place}
    )
    first, last = starts[0][0], starts[-1][1]
    if sum(stop - start for start, stop in starts) != last - first:
        raise UserError("this process's streams are not contiguous in the mesh")
    return slice(first, last)
