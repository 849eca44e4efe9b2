"""The attention kernels by name, and the fastest for each device."""

import math

import jax
from jax.sharding import AbstractMesh

from txl_jax.kernels import chunked, cudnn, xla
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import divides, follow_mesh, stream_axes, target_device
from txl_jax.kernels.tpu import fused
from txl_jax.kernels.tpu.blocks import VMEM, fit_all

KERNELS: dict[str, Kernel] = {
    "xla": follow_mesh(xla.rel_attention, required=False),
    "chunked": follow_mesh(chunked.rel_attention),
    "cudnn": follow_mesh(cudnn.rel_attention),
    "tpu": follow_mesh(fused.rel_attention),
}

# Devices whose fastest kernel is not `xla`, by the TPU compiler's estimates
# (experiments/benchmarks/tpu_estimate.md). Measured on CPUs, `xla` is faster than
# `chunked`, which takes less memory (experiments/benchmarks/results.jsonl).
FASTEST = dict.fromkeys(VMEM, "tpu")
# On a GPU without `cudnn`, `auto` selects `chunked` from this number of scores of a
# layer on (1 GiB in float32). By the GPU compiler's figures, the published configs with
# so many scores and no remat policy do not fit into 80 GB with `xla`.
MANY_SCORES = 2**28


def choose_kernel(name: str, operands: Operands) -> Kernel:
    """Returns the kernel of that name; `auto` is the fastest on the queries' device."""
    if name == "auto":
        name = fastest(operands, jax.typeof(operands.q_BLHA).sharding.mesh)
    return KERNELS[name]


def fastest(operands: Operands, mesh: AbstractMesh) -> str:
    """Returns the name of the kernel that `auto` selects; operands may be abstract.

    It is `xla`, which the compiler can split, if streams or heads do not divide over
    the mesh. Otherwise it is `cudnn` where that applies; on a TPU `tpu`, or `chunked`
    for more keys than `tpu` can hold; elsewhere `xla`, or `chunked` from MANY_SCORES
    per device on, except on a CPU.
    """
    device = target_device(mesh)
    (B, L, H, A), K = operands.q_BLHA.shape, operands.k_BKHA.shape[1]
    dtype, parts = operands.q_BLHA.dtype, 1
    if not (mesh.empty or mesh.manual_axes):
        if not divides(mesh, B, H):
            return "xla"
        axes = (*stream_axes(mesh, B), "model")
        parts = math.prod(mesh.shape[axis] for axis in axes)
    if not cudnn.obstacle(device, A, dtype, operands.dropout is not None):
        return "cudnn"
    name = FASTEST.get(device.device_kind, "xla")
    if name == "tpu":
        features = fused.count_features(operands.position, A)
        fits = any(fit_all(device.device_kind, L, K, features, dtype.itemsize))
        return "tpu" if fits else "chunked"
    many = B * H * L * K >= MANY_SCORES * parts
    return "chunked" if many and device.platform != "cpu" else name
