"""Kernels on a mesh: each device computes its own streams and heads.

Streams and heads are independent, so a kernel that the compiler cannot split (a Pallas
call, a loop of data-dependent length) runs unchanged on every shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec

from txl_jax.errors import UserError
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.xla import Kernel
from txl_jax.sharding.rules import RULES, shards

# Specs of a kernel's arrays: q, k, v, r, u, w, bias and oldest.
SPECS = tuple(
    nn.logical_to_mesh_axes(tuple(letters), RULES) or PartitionSpec()
    for letters in ("BLHA", "BKHA", "BKHA", "RHA", "HA", "HA", "HR", "BL")
)
REPLICATED = PartitionSpec()
AXES: dict[str, Any] = {letter: dict(RULES)[letter] for letter in "BHV"}
WHOLE = [PartitionSpec(*(x if x != AXES["B"] else None for x in y)) for y in SPECS]


def follow_mesh(kernel: Kernel, required: bool = True) -> Kernel:
    """Returns the kernel, split over the mesh of its queries, if any.

    Under jit the mesh is part of an array's type, so no argument passes it. Inside a
    shard_map there is nothing left to split. Dropout has the mask of a single device.

    If streams do not divide over the mesh, as the single one of a generation, each
    device computes all of them. Raises UserError if heads do not divide. If the split
    is not `required`, the compiler splits the kernel then, which is slow on a TPU,
    where it moves scores between devices to shift them.
    """

    @functools.wraps(kernel)
    def call(*args: Any) -> Array:
        *arrays, dropout = args
        mesh = split_mesh(arrays[0])
        B, _, H, _ = arrays[0].shape
        if mesh is None or not (required or divides(mesh, B, H)):
            return kernel(*args)
        check_heads(mesh, H)
        is_split = not B % shards(mesh, "B")
        specs = SPECS if is_split else WHOLE

        def local(*args: Any) -> Array:
            *arrays, counter = args
            if counter is not None:
                B, _, H, _ = arrays[0].shape
                seed, stream0, head0 = counter
                stream0 += first_index("B", B) if is_split else 0
                head0 += first_index("H", H)
                counter = AttentionDropout(dropout.rate, seed, stream0, head0)
            return kernel(*(*arrays, counter))

        # A Pallas call does not state over which axes its result varies.
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(*specs, REPLICATED),
            out_specs=specs[0],
            check_vma=False,
        )(*arrays, dropout and tuple(map(jnp.uint32, dropout[1:])))

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
    streams = PartitionSpec(AXES["B"])
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
    return None if mesh is None or len(x_B) % shards(mesh, "B") else mesh


def device_kind() -> str:
    """Returns the kind of device that the running trace is for.

    It is that of the mesh, if one is set (`jax.set_mesh`), so that programs can be
    compiled without a TPU; otherwise the first device's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else jax.devices()[0].device_kind


def first_index(letter: str, size: int) -> Array:
    """Returns the global index of this shard's first stream or head, uint32."""
    return jax.lax.axis_index(AXES[letter]).astype(jnp.uint32) * size


def divides(mesh: AbstractMesh, B: int, H: int) -> bool:
    """Returns whether B streams and H heads divide over the mesh."""
    return not (B % shards(mesh, "B") or H % shards(mesh, "H"))


def check_heads(mesh: AbstractMesh, H: int) -> None:
    """Raises UserError unless H heads divide over the mesh."""
    parts = shards(mesh, "H")
    if H % parts:
        raise UserError(
            f"model.n_head = {H} is not divisible by mesh.model = {parts}: lower "
            'mesh.model, or set model.kernel = "xla"'
        )
