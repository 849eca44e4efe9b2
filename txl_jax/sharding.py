"""The device mesh, and the table that maps dimensions to its axes.

Dims: as in the glossary of `txl_jax`; a letter that RULES does not name is replicated.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.errors import UserError
from txl_jax.runtime.options import MeshConfig

AXES = ("data", "fsdp", "model")

# Streams are split over data and fsdp; parameters over fsdp (the devices of a group
# together hold one copy) and, within a layer, over model.
RULES: tuple[tuple[str, Any], ...] = (
    ("B", ("data", "fsdp")),
    ("D", "fsdp"),
    ("E", "fsdp"),  # unless D has taken it
    ("H", "model"),
    ("F", "model"),
    ("V", "model"),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (default: all of them).

    Several slices of TPUs, which only the data-center network connects, split the data
    axis: its slowest part is between slices, everything else inside one.

    Raises UserError if the sizes do not multiply to the number of devices, or if
    mesh.data is not a multiple of the number of slices.
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
    placed = arrange(filled, devices)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices as an array [data, fsdp, model]; slices split data only."""
    # On GPUs slice_index numbers the hosts, over which any axis may extend.
    on_tpu = devices[0].platform == "tpu"
    # Devices of a topology that is not attached lack the attribute in a single slice.
    indices = {getattr(device, "slice_index", 0) for device in devices}
    slices = len(indices) if on_tpu else 1
    data, *inner = sizes
    if data % slices:
        raise UserError(
            f"mesh.data = {data} is not a multiple of the {slices} slices, which split "
            "only streams: make mesh.fsdp x mesh.model a divisor of "
            f"{len(devices) // slices}, the devices of a slice"
        )
    # Neighbours in the mesh are neighbours on the chips' torus. Unlike jax.make_mesh,
    # this may split an axis of the torus to reach a size.
    if slices == 1:
        return mesh_utils.create_device_mesh(
            sizes, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_hybrid_device_mesh(
        [data // slices, *inner],
        [slices, 1, 1],
        devices,
        allow_split_physical_axes=True,
    )


def sharding(mesh: Mesh, letters: Iterable[str | None]) -> NamedSharding:
    """Returns the sharding of an array whose dimensions are `letters`.

    A mesh axis splits at most one dimension: the first that RULES maps to it.
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


def letters(tree: Any) -> Any:
    """Returns each array's dimensions, the letters that end its field's name."""

    def spec(path: Any, _: Any) -> PartitionSpec:
        names = [key.name for key in path if hasattr(key, "name")]
        return PartitionSpec(*names[-1].rpartition("_")[2])

    return jax.tree_util.tree_map_with_path(spec, tree)


def shards(mesh: Mesh | AbstractMesh, letter: str) -> int:
    """Returns the number of shards into which RULES splits a dimension."""
    axes = dict(RULES)[letter]
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[axis] for axis in axes)


def place_segments(mesh: Mesh, segments: Any) -> Any:
    """Moves host arrays [S, B, ..] of this process's streams to the devices."""
    # With several processes, jax treats this as an implicit transfer.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(
                sharding(mesh, "SBL"[: x.ndim]), x
            ),
            segments,
        )


def check_streams(mesh: Mesh | AbstractMesh, batch_size: int, field: str) -> None:
    """Raises UserError, naming the config's field, unless the streams divide."""
    parts = shards(mesh, "B")
    if batch_size % parts:
        raise UserError(
            f"{field} = {batch_size} is not divisible by mesh.data x mesh.fsdp = "
            f"{parts} shards: make it a multiple of {parts}, or raise mesh.model"
        )


def host_rows(mesh: Mesh, batch_size: int, field: str) -> np.ndarray:
    """Returns the indices of the streams that this process reads, in rising order.

    They need not be contiguous: neighbours in the mesh are neighbours on the chips'
    torus, and the chips of a TPU host may be far apart in the mesh. Raises UserError,
    naming the config's `field`, if the streams do not divide over the mesh.
    """
    check_streams(mesh, batch_size, field)
    places = sharding(mesh, "B").addressable_devices_indices_map((batch_size,))
    ranges = {place[0].indices(batch_size)[:2] for place in places.values() if place}
    return np.concatenate([np.arange(*each) for each in sorted(ranges)])
