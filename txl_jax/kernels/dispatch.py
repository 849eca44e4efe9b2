"""The attention kernels by name, and what `auto` means."""

import jax
from jax.sharding import AbstractDevice
from jax.typing import DTypeLike

from txl_jax.kernels import chunked, cudnn, xla
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import divides, follow_mesh, split_mesh, target_device
from txl_jax.kernels.tpu import fused
from txl_jax.kernels.tpu.blocks import VMEM

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

    A training with a choice has replaced `auto` by what it measured
    (`workdir.kernel_choice`).
    """
    return KERNELS[known_fastest(operands) if name == "auto" else name]


def known_fastest(operands: Operands) -> str:
    """Returns the kernel of FASTEST for the operands' device, if it applies, or `xla`.

    Only `xla` is split by the compiler if streams or heads do not divide over the mesh.
    """
    q_BLHA, has_dropout = operands.q_BLHA, operands.dropout is not None
    (B, _, H, A), dtype = q_BLHA.shape, q_BLHA.dtype
    if (mesh := split_mesh(q_BLHA)) and not divides(mesh, B, H):
        return "xla"
    device = target_device(jax.typeof(q_BLHA).sharding.mesh)
    name = FASTEST.get(device.device_kind, "xla")
    return name if name in find_candidates(device, A, dtype, has_dropout) else "xla"


def find_candidates(
    device: jax.Device | AbstractDevice, A: int, dtype: DTypeLike, dropout: bool
) -> list[str]:
    """Returns the kernels that apply on a device; on a CPU, `xla` is the fastest."""
    if device.platform == "cpu":
        return ["xla"]
    has_cudnn = not cudnn.obstacle(device, A, dtype, dropout)
    applies = {"cudnn": has_cudnn, "tpu": device.device_kind in VMEM}
    return [name for name in KERNELS if applies.get(name, True)]
