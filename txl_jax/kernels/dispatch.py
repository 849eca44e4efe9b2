"""The attention kernels by name, and those that apply on a device."""

import jax
from jax.typing import DTypeLike

from txl_jax.kernels import chunked, cudnn, xla
from txl_jax.kernels.operands import Kernel
from txl_jax.kernels.sharded import follow_mesh
from txl_jax.kernels.tpu import fused
from txl_jax.kernels.tpu.blocks import VMEM

KERNELS: dict[str, Kernel] = {
    "xla": follow_mesh(xla.rel_attention, required=False),
    "chunked": follow_mesh(chunked.rel_attention),
    "cudnn": follow_mesh(cudnn.rel_attention),
    "tpu": follow_mesh(fused.rel_attention),
}


def choose_kernel(name: str) -> Kernel:
    """Returns the kernel of that name; `auto` is `xla`.

    A training with a choice has replaced `auto` by what it measured
    (`workdir.kernel_choice`).
    """
    return KERNELS["xla" if name == "auto" else name]


def find_candidates(
    device: jax.Device, A: int, dtype: DTypeLike, dropout: bool
) -> list[str]:
    """Returns the kernels that apply on a device; on a CPU, `xla` is the fastest."""
    if device.platform == "cpu":
        return ["xla"]
    has_cudnn = not cudnn.obstacle(device, A, dtype, dropout)
    applies = {"cudnn": has_cudnn, "tpu": device.device_kind in VMEM}
    return [name for name in KERNELS if applies.get(name, True)]
