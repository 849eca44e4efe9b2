"""The attention kernels by name, and the fastest for each device."""

import math

import jax
from jax.sharding import AbstractMesh

from txl_jax.kernels import chunked, xla
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import divides, follow_mesh, stream_axes
from txl_jax.kernels.tpu import fused
from txl_jax.kernels.tpu.blocks import VMEM, fit_all

KERNELS: dict[str, Kernel] = {
    "xla": follow_mesh(xla.rel_attention, required=False),
    "chunked": follow_mesh(chunked.rel_attention),
    "tpu": follow_mesh(fused.rel_attention),
}

# Devices whose fastest kernel is not `xla`, by the TPU compiler's estimates
# (experiments/benchmarks/tpu_estimate.md). On the CPU, `xla` was measured to be faster
# than `chunked`, which takes less memory (experiments/benchmarks/results.jsonl).
FASTEST = dict.fromkeys(VMEM, "tpu")
# Scores of one layer, 1 GiB in float32, from which `auto` selects `chunked` on a GPU.
# The published configs with so many scores and no remat policy need more memory with
# `xla`, by the GPU compiler's figures, than a GPU of 80 GB has.
MANY_SCORES = 2**28


def choose_kernel(name: str, operands: Operands) -> Kernel:
    """Returns the kernel of that name; `auto` is the fastest on the queries' device."""
    if name != "auto":
        return KERNELS[name]
    q_BLHA, K = operands.q_BLHA, operands.k_BKHA.shape[1]
    B, L, H, A = q_BLHA.shape
    features = fused.count_features(operands.position, A)
    mesh, itemsize = jax.typeof(q_BLHA).sharding.mesh, q_BLHA.dtype.itemsize
    return KERNELS[fastest(mesh, B, L, H, K, features, itemsize)]


def fastest(
    mesh: AbstractMesh, B: int, L: int, H: int, K: int, features: int, itemsize: int
) -> str:
    """Returns the name of the kernel that `auto` selects for L queries and K keys.

    This is `xla`, which the compiler can split, if streams or heads do not divide over
    the mesh. Otherwise it is FASTEST's, or `chunked` for more keys, of so many features
    and bytes each, than `tpu` can hold, and for MANY_SCORES instead of `xla`, but not
    on a CPU.
    """
    device = mesh.abstract_device or jax.devices()[0]
    parts = 1
    if not (mesh.empty or mesh.manual_axes):
        if not divides(mesh, B, H):
            return "xla"
        axes = (*stream_axes(mesh, B), "model")
        parts = math.prod(mesh.shape[axis] for axis in axes)
    many = B * H * L * K >= MANY_SCORES * parts
    kind = device.device_kind
    name = FASTEST.get(kind, "xla")
    if name == "tpu" and not any(fit_all(kind, L, K, features, itemsize)):
        name = "chunked"
    if many and name == "xla" and device.platform != "cpu":
        return "chunked"
    return name
