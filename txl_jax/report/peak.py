"""The peak FLOP/s of the run's devices, of which the utilization (MFU) is a share."""

import functools
import re
import timeit

import jax
import jax.numpy as jnp

# Of one jax device, for dense bfloat16 products (float16 on T4): by Google's page of
# each chip, cloud.google.com/tpu/docs/v4 and so on, and by NVIDIA's data sheets,
# without sparsity, read in November 2026. On v2 and v3 a device is one of two cores.
PEAK_FLOPS = {
    **{"TPU v2": 22.5e12, "TPU v3": 61.5e12, "TPU v4": 275e12},
    **{"TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12},
    **{"TPU v6 lite": 918e12, "TPU v6e": 918e12},
    **{"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12},
    **{"GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12},
    **{"L4": 121e12, "T4": 65e12},
}
# Sizes of the matrices whose product is timed where no peak is known: it must take much
# longer than its dispatch.
CPU_SIZE, SIZE = 1024, 8192
REPEATS = 6  # the first one compiles


def peak_flops() -> float:
    """Returns the peak FLOP/s of all devices, measured where it is not known."""
    device = jax.local_devices()[0]
    if peak := known_peak(device.device_kind):
        return peak * jax.device_count()
    # The CPU devices of a process share its cores.
    count = jax.process_count() if device.platform == "cpu" else jax.device_count()
    return measured_peak() * count


def known_peak(device_kind: str) -> float:
    """Returns the peak FLOP/s of a kind of device, or 0 if PEAK_FLOPS lacks it."""
    names = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_kind)]
    return PEAK_FLOPS[max(names, key=len)] if names else 0.0


@functools.cache
def measured_peak() -> float:
    """Returns the FLOP/s of a float32 matrix product, the best of a few."""
    device = jax.local_devices()[0]
    size = CPU_SIZE if device.platform == "cpu" else SIZE
    x = jax.device_put(jnp.ones((size, size)), device)
    multiply = jax.jit(jnp.matmul)
    seconds = timeit.repeat(
        lambda: multiply(x, x).block_until_ready(), number=1, repeat=REPEATS
    )
    return 2 * size**3 / min(seconds)
