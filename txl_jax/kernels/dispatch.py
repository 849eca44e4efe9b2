"""The attention kernels by name, and what `auto` means."""

import jax
from jax.sharding import AbstractMesh

from txl_jax.kernels import chunked, cudnn, xla
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import divides, follow_mesh, target_device
from txl_jax.kernels.tpu import fused

KERNELS: dict[str, Kernel] = {
    "xla": follow_mesh(xla.rel_attention, required=False),
    "chunked": follow_mesh(chunked.rel_attention),
    "cudnn": follow_mesh(cudnn.rel_attention),
    "tpu": follow_mesh(fused.rel_attention),
}

# By device, the kernel with the fastest measured training step (in the repository's
# docs/howto/gpus.md). `auto` takes it where nothing is measured at the start, and `xla`
# on other devices.
FASTEST = {"NVIDIA H200": "cudnn"}


def choose_kernel(name: str, operands: Operands) -> Kernel:
    """Returns the kernel of that name; for `auto` see FASTEST.

    A training has replaced `auto` by what it measured (`workdir.kernel_choice`).
    """
    if name == "auto":
        name = known_fastest(operands, jax.typeof(operands.q_BLHA).sharding.mesh)
    return KERNELS[name]


def known_fastest(operands: Operands, mesh: AbstractMesh) -> str:
    """Returns the kernel of FASTEST for the operands' device, if it applies, or `xla`.

    Only `xla` is split by the compiler if streams or heads do not divide over the mesh.
    """
    device, (B, _, H, A) = target_device(mesh), operands.q_BLHA.shape
    is_split = not (mesh.empty or mesh.manual_axes)
    name = FASTEST.get(device.device_kind, "xla")
    dtype, has_dropout = operands.q_BLHA.dtype, operands.dropout is not None
    if name == "cudnn" and cudnn.obstacle(device, A, dtype, has_dropout):
        return "xla"
    return "xla" if is_split and not divides(mesh, B, H) else name
