"""Kernels on a mesh: each device computes its own streams and heads.

Streams and heads are independent, so a kernel that the compiler cannot split (a Pallas
call, a loop of data-dependent length) runs unchanged on every shard.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from txl_jax.errors import UserError
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.sharding.rules import RULES, STREAMS, letters, mesh_axes, shards

REPLICATED = PartitionSpec()
AXIS: dict[str, Any] = {letter: dict(RULES)[letter] for letter in "HV"}


def follow_mesh(kernel: Kernel, required: bool = True) -> Kernel:
    """Returns the kernel, split over the mesh of its queries, if any.

    Under jit the mesh is part of an array's type, so no argument passes it. Inside a
    shard_map there is nothing left to split. Dropout has the mask of a single device.

    If streams do not divide over the mesh, such as a generation's single stream, each
    device computes all of them. If heads do not divide, UserError is raised or, unless
    the split is `required`, the compiler splits the kernel. That is slow on a TPU,
    where scores move between devices for their shift.
    """

    @functools.wraps(kernel)
    def call(operands: Operands) -> Array:
        mesh = split_mesh(operands.q_BLHA)
        B, _, H, _ = operands.q_BLHA.shape
        if mesh is None or not (required or divides(mesh, B, H)):
            return kernel(operands)
        if H % (parts := shards(mesh, "H")):
            raise UserError(
                f"model.n_head = {H} is not divisible by mesh.model = {parts}: lower "
                'mesh.model, or set model.kernel = "xla"'
            )
        axes = stream_axes(mesh, B)

        def local(operands: Operands) -> Array:
            if dropout := operands.dropout:
                B, _, H, _ = operands.q_BLHA.shape
                dropout = dataclasses.replace(
                    dropout,
                    stream0=dropout.stream0 + (first_index(STREAMS, B) if axes else 0),
                    head0=dropout.head0 + first_index(AXIS["H"], H),
                )
            return kernel(operands._replace(dropout=dropout))

        counter = jax.tree.map(jnp.uint32, operands.dropout)
        operands = operands._replace(dropout=counter)
        # A Pallas call does not state the axes over which its result varies.
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(mesh_axes(letters(operands), axes),),
            out_specs=mesh_axes(PartitionSpec(*"BLHA"), axes),
            check_vma=False,
        )(operands)

    return call


def over_streams(
    function: Callable[..., Array],
    shared: Any,
    *of_streams: Array,
    specs: Any = REPLICATED,
) -> Array:
    """Returns function(shared, *of_streams), computed on each shard of the streams.

    `shared` is replicated, or sharded by `specs`; its gradient is the sum over devices.
    The first dimension of the other arguments and of the result is streams. If streams
    do not divide over the mesh, the compiler splits the function.
    """
    mesh = stream_mesh(of_streams[0])
    if mesh is None:
        return function(shared, *of_streams)
    streams = PartitionSpec(stream_axes(mesh, len(of_streams[0])))
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(specs, *(streams for _ in of_streams)),
        out_specs=streams,
        check_vma=False,
    )(shared, *of_streams)


def split_mesh(x: Array) -> AbstractMesh | None:
    """Returns the mesh of x if it has several devices, otherwise None."""
    mesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def stream_mesh(x_B: Array) -> AbstractMesh | None:
    """Returns the mesh over which the streams of x divide, or None."""
    mesh = split_mesh(x_B)
    return mesh if mesh is not None and stream_axes(mesh, len(x_B)) else None


def replicate(x: Array) -> Array:
    """Gives x, whole, to each device of its mesh, if any."""
    mesh = split_mesh(x)
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, REPLICATED))


def stream_axes(mesh: AbstractMesh, B: int) -> tuple[str, ...]:
    """Returns the axes that split B streams, () if B does not divide over them."""
    return STREAMS if B % shards(mesh, "B") == 0 else ()


def target_device(mesh: AbstractMesh | None = None) -> jax.Device | AbstractDevice:
    """Returns a device of the kind for which the running trace compiles.

    It is a local device, unless the mesh (by default, the mesh of `jax.set_mesh`) has
    others, for which programs can be compiled without having them.
    """
    abstract = (mesh or jax.sharding.get_abstract_mesh()).abstract_device
    device = jax.local_devices()[0]
    is_here = abstract is None or abstract.device_kind == device.device_kind
    return device if is_here else abstract


def device_memory() -> int:
    """Returns the bytes for arrays on a target device, 0 if unknown."""
    device = target_device()
    stats = device.memory_stats() if isinstance(device, jax.Device) else None
    return (stats or {}).get("bytes_limit", 0)


def first_index(axes: str | tuple[str, ...], size: int) -> Array:
    """Returns the global index of this shard's first stream or head, uint32."""
    return jax.lax.axis_index(axes).astype(jnp.uint32) * size


def divides(mesh: AbstractMesh, B: int, H: int) -> bool:
    """Returns whether B streams and H heads divide over the mesh."""
    return bool(stream_axes(mesh, B)) and H % shards(mesh, "H") == 0
