"""The device mesh: the devices of all processes along three axes."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from txl_jax.errors import UserError
from txl_jax.sharding.options import MeshConfig

AXES = ("data", "fsdp", "model")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (default: all).

    Several slices of TPUs, which only the data-center network connects, split the data
    axis: its slowest part is between slices, everything else inside a slice.

    Raises UserError if the sizes do not multiply to the number of devices, or if
    mesh.data is not a multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    filled = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(filled) != len(devices):
        near = dataclasses.asdict(nearest_mesh(config, len(devices)))
        fix = (f"mesh.{x}={y}" for x, y in near.items() if y != getattr(config, x))
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.model = {sizes} does not fit "
            f"{len(devices)} device{'s' * (len(devices) > 1)}; "
            f"set {' and '.join(fix)}"
        )
    placed = arrange(filled, devices)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def nearest_mesh(config: MeshConfig, count: int) -> MeshConfig:
    """Returns a mesh for `count` devices; all sizes but data divide `config`'s."""
    fsdp = math.gcd(config.fsdp, count)  # gcd(-1, n) = 1
    model = math.gcd(config.model, count // fsdp)
    return MeshConfig(fsdp=fsdp, model=model)


def arrange(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices as an array in the order of AXES; slices split data only."""
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
