"""The attention kernels by name, and the fastest for each device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import chunked, xla
from txl_jax.kernels.sharded import divides, follow_mesh
from txl_jax.kernels.tpu import attention
from txl_jax.kernels.tpu.blocks import VMEM
from txl_jax.kernels.xla import Kernel


def repeat_farthest(kernel: Kernel) -> Kernel:
    """Returns a kernel that accepts R < K, given one that requires R = K."""

    @functools.wraps(kernel)
    def call(q: Array, k_BKHA: Array, v: Array, r_RHA: Any, *rest: Any) -> Array:
        u, w, bias_HR, *others = rest
        missing = 0 if r_RHA is None else k_BKHA.shape[1] - r_RHA.shape[0]
        if missing:
            r_RHA = jnp.pad(r_RHA, ((missing, 0), (0, 0), (0, 0)), "edge")
            if bias_HR is not None:
                bias_HR = jnp.pad(bias_HR, ((0, 0), (missing, 0)), "edge")
        return kernel(q, k_BKHA, v, r_RHA, u, w, bias_HR, *others)

    return call


KERNELS: dict[str, Kernel] = {
    "xla": follow_mesh(xla.rel_attention, required=False),
    "chunked": follow_mesh(repeat_farthest(chunked.rel_attention)),
    "tpu": follow_mesh(repeat_farthest(attention.rel_attention)),
}

# Devices whose fastest kernel is not `xla`, by the TPU compiler's estimates
# (experiments/benchmarks/tpu_estimate.md; for short segments on v4 both are equal). On
# the CPU, `xla` was measured to be faster than `chunked`, which takes less memory
# (experiments/benchmarks/results.jsonl).
FASTEST = dict.fromkeys(VMEM, "tpu")


def choose_kernel(name: str, q_BLHA: Array) -> Kernel:
    """Returns the kernel of that name; `auto` is the fastest on the queries' device."""
    return KERNELS[fastest(q_BLHA) if name == "auto" else name]


def fastest(q_BLHA: Array) -> str:
    """Returns the name of the kernel that `auto` selects.

    If streams or heads do not divide over the mesh, `auto` selects `xla`, which the
    compiler can split.
    """
    mesh = jax.typeof(q_BLHA).sharding.mesh
    device = mesh.abstract_device or jax.devices()[0]
    B, _, H, _ = q_BLHA.shape
    if not (mesh.empty or mesh.manual_axes or divides(mesh, B, H)):
        return "xla"
    return FASTEST.get(device.device_kind, "xla")
