"""A kernel on a mesh: each device attends for its own streams and heads.

No stream or head looks at another, so a kernel that the compiler cannot split (a Pallas
call, a loop whose length depends on the data) runs on every shard as it is.

Dims: B streams, L queries, K keys, R = K distances, H heads, A head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from txl_jax.errors import UserError
from txl_jax.kernels.xla import Dropout
from txl_jax.sharding import RULES

Kernel = Callable[..., Array]

# The arrays that a kernel takes: q, k, v, r, u, w, bias and oldest.
SPECS = tuple(
    nn.logical_to_mesh_axes(tuple(letters), RULES)
    for letters in ("BLHA", "BKHA", "BKHA", "RHA", "HA", "HA", "HR", "BL")
)
WHOLE = PartitionSpec()
AXES: dict[str, Any] = {letter: dict(RULES)[letter] for letter in "BHV"}


def follow_mesh(kernel: Kernel, needed: bool = True) -> Kernel:
    """Returns the same function as the kernel, split over its queries' mesh if any.

    Inside of jit an array's type tells the mesh, so nobody has to pass it. Within a
    shard_map there is nothing left to split. needed: the compiler cannot split the
    kernel; otherwise it does, where streams or heads do not divide. (Where they do it
    should not: on a TPU it moves scores between devices to shift them.)
    """

    @functools.wraps(kernel)
    def call(q_BLHA: Array, *args: Any, **more: Any) -> Array:
        mesh = jax.typeof(q_BLHA).sharding.mesh
        B, _, H, _ = q_BLHA.shape
        whole = mesh.empty or mesh.size == 1 or mesh.manual_axes
        whole = whole or not needed and (B % shards(mesh, "B") or H % shards(mesh, "H"))
        return (kernel if whole else shard(kernel, mesh))(q_BLHA, *args, **more)

    return call


def shard(kernel: Kernel, mesh: Mesh | AbstractMesh) -> Kernel:
    """Returns the same function as the kernel, each device doing its own part.

    Dropout draws the mask of one device. Raises UserError when streams or heads do not
    divide over the mesh.
    """

    @functools.wraps(kernel)
    def call(
        q_BLHA: Array,
        k_BKHA: Array,
        v_BKHA: Array,
        r_RHA: Array | None,
        u_HA: Array | None,
        w_HA: Array | None,
        bias_HR: Array | None,
        oldest_BL: Array,
        dropout: Dropout | None,
    ) -> Array:
        check_divides(mesh, q_BLHA.shape[0], q_BLHA.shape[2])

        def local(arrays: tuple[Any, ...], counter: Any) -> Array:
            if dropout is None:
                return kernel(*arrays, None)
            B, _, H, _ = arrays[0].shape
            seed, stream0, head0 = counter
            stream0 += first("B", B)
            head0 += first("H", H)
            return kernel(*arrays, Dropout(dropout.rate, seed, stream0, head0))

        # Pallas calls do not say over which axes their results vary: no check of it.
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(SPECS, PartitionSpec()),
            out_specs=SPECS[0],
            check_vma=False,
        )(
            (q_BLHA, k_BKHA, v_BKHA, r_RHA, u_HA, w_HA, bias_HR, oldest_BL),
            None if dropout is None else tuple(map(jnp.uint32, dropout[1:])),
        )

    return call


def over_streams(
    function: Callable[..., Array], specs: Any = WHOLE
) -> Callable[..., Array]:
    """Returns function(whole, *of_streams) as each shard's own work on a mesh.

    `whole` comes whole to every device, or as `specs` say, and what devices share of it
    has the sum of their gradients; the rest, and the result, have streams first.
    Streams that do not divide are left to the compiler.
    """

    def call(whole: Any, *of_streams: Array) -> Array:
        mesh = stream_mesh(of_streams[0])
        if mesh is None:
            return function(whole, *of_streams)
        streams = PartitionSpec(AXES["B"])
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(specs, *(streams for _ in of_streams)),
            out_specs=streams,
            check_vma=False,
        )(whole, *of_streams)

    return call


def stream_mesh(x_B: Array) -> AbstractMesh | None:
    """Returns the mesh over which streams are to be split, or None."""
    mesh = jax.typeof(x_B).sharding.mesh
    whole = mesh.empty or mesh.size == 1 or mesh.manual_axes
    return None if whole or len(x_B) % shards(mesh, "B") else mesh


def first(letter: str, size: int) -> Array:
    """Returns the global index of this shard's first stream or head, uint32."""
    return jax.lax.axis_index(AXES[letter]).astype(jnp.uint32) * size


def shards(mesh: Mesh | AbstractMesh, letter: str) -> int:
    """Returns how many shards of streams or heads there are."""
    axes = (AXES[letter],) if isinstance(AXES[letter], str) else AXES[letter]
    return math.prod(mesh.shape[axis] for axis in axes)


def check_divides(mesh: Mesh | AbstractMesh, B: int, H: int) -> None:
    """Raises UserError unless every shard has as many streams, and heads."""
    shards_B = shards(mesh, "B")
    if B % shards_B:
        raise UserError(
            f"{B} streams at once do not divide over mesh.data x mesh.fsdp = "
            f"{shards_B}: make batch_size / batch_chunk (in evaluation, streams) a "
            f"multiple of {shards_B}, or raise mesh.model"
        )
    shards_H = shards(mesh, "H")
    if H % shards_H:
        raise UserError(
            f"model.n_head = {H} does not divide over mesh.model = {shards_H}: lower "
            'mesh.model, or set model.kernel = "xla"'
        )
