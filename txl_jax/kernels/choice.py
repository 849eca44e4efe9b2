"""Which kernel attends: the named one, or the fastest where the program is to run.

Dims: B streams, L queries, H heads, A head.
"""

import jax
from jax import Array

from txl_jax.errors import UserError
from txl_jax.kernels import chunked, sharded, tpu, xla

KERNELS = {
    "xla": sharded.follow_mesh(xla.rel_attention, needed=False),
    "chunked": sharded.follow_mesh(xla.every_distance(chunked.rel_attention)),
    "tpu": sharded.follow_mesh(xla.every_distance(tpu.rel_attention)),
}
NAMES = ("auto", *KERNELS)


# Where a kernel agrees with the oracle and is faster, as the TPU compiler estimates it
# (experiments/benchmarks/tpu_estimate.md; for short segments on v4, as fast). All else
# has `xla`: on the CPU it was measured ahead of `chunked`, which takes less memory
# (experiments/benchmarks/results.jsonl).
FASTEST = dict.fromkeys(
    ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"),
    "tpu",
)


def choose_kernel(name: str, q_BLHA: Array) -> sharded.Kernel:
    """Returns the kernel of that name; `auto` goes by the device the queries are on.

    Where streams or heads do not divide over the mesh `auto` is `xla`, which the
    compiler splits.
    """
    if name == "auto":
        name = fastest(q_BLHA)
    return KERNELS[name]


def fastest(q_BLHA: Array) -> str:
    """Returns the name of the kernel that `auto` stands for."""
    mesh = jax.typeof(q_BLHA).sharding.mesh
    device = mesh.abstract_device or jax.devices()[0]
    if device.device_kind not in FASTEST:
        return "xla"
    if not (mesh.empty or mesh.manual_axes):
        try:
            sharded.check_divides(mesh, q_BLHA.shape[0], q_BLHA.shape[2])
        except UserError:
            return "xla"
    return FASTEST[device.device_kind]
