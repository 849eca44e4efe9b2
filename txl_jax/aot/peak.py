"""Peak FLOP/s of a run's devices, the denominator of model FLOPs utilization (MFU)."""

import functools
import re
import time

import jax
import jax.numpy as jnp

# Of one jax device, for dense bfloat16 products (float16 on T4). TPUs: the pages cited
# in `chips`; a device of v2 and v3 is a core, half of a chip. GPUs: NVIDIA's data
# sheets of the SXM models, without sparsity, read in November 2026.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "L4": 121e12,
    "T4": 65e12,
}
# Sizes of the matrices whose product is timed where no peak is known: it must take much
# longer than its dispatch.
CPU_SIZE, SIZE = 1024, 8192
REPEATS = 5


def peak_flops() -> float:
    """Returns the peak FLOP/s of all devices of the run.

    The peak of a CPU, or of an unknown accelerator, is measured by a matrix product.
    """
    device = jax.local_devices()[0]
    if peak := known_peak(device.device_kind):
        return peak * jax.device_count()
    # The CPU devices of a process share its cores.
    count = jax.process_count() if device.platform == "cpu" else jax.device_count()
    return measured_peak() * count


def known_peak(device_kind: str) -> float:
    """Returns the peak FLOP/s of a kind of device, or 0 if PEAK_FLOPS lacks it."""
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", device_kind):
            return peak
    return 0.0


@functools.cache
def measured_peak() -> float:
    """Returns the FLOP/s of a float32 matrix product, the best of a few."""
    device = jax.local_devices()[0]
    size = CPU_SIZE if device.platform == "cpu" else SIZE
    x = jax.device_put(jnp.ones((size, size)), device)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
