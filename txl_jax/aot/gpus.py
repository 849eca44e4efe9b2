"""Descriptions of NVIDIA GPUs, for which XLA:GPU compiles without a GPU.

The compiler reads the properties of a GPU from a text, the target description.
"""

import importlib.util
import math
from typing import NamedTuple

import jax

from txl_jax.errors import UserError

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Without a device nothing tells which products are faster in Triton, and the compiler's
# guess of their tiles fails for some shapes: all products are cuBLAS's.
OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
NVLINK = 8  # GPUs that an HGX board joins by NVLink switches


class Gpu(NamedTuple):
    """One GPU of the SXM form, in bytes, bytes per second and GHz.

    From the descriptions in the compiler's repository, openxla/xla, folder
    xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm, h200 and b200), read in
    November 2026.
    """

    kind: str  # of jax
    capability: int  # major version of the compute capability; the minor one is 0
    cores: int
    fpus: int  # of a core
    clock: float
    shared: int  # memory of a core; a block may have 1 KiB less
    cache: int  # level 2
    memory: int
    bandwidth: int

    @property
    def usable(self) -> float:
        """The memory that jax reserves for itself unless told otherwise."""
        return 0.75 * self.memory

    def describe(self) -> str:
        """Returns the target description, a GpuTargetConfigProto."""
        feature = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024} l2_cache_size: {self.cache}
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
  memory_bandwidth: {self.bandwidth} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {self.capability} feature_extension: {feature} }}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.kind}"
"""


HOPPER = (9, 132, 128, 1.98, 233_472, 52_428_800)
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167_936, 41_943_040),
        *(85_100_068_864, 2_039_040_000_000),
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", *HOPPER, 84_942_979_072, 3_352_320_000_000),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", *HOPPER, 151_397_597_184, 4_800_000_000_000),
    "b200": Gpu(
        *("NVIDIA B200", 10, 148, 128, 1.965, 233_472, 132_644_864),
        *(191_514_411_008, 7_672_320_000_000),
    ),
}


def limit(kind: str) -> float:
    """Returns the usable memory of a kind of jax device; inf if it is not in GPUS.

    XLA:GPU, unlike libtpu, also compiles what does not fit.
    """
    return next((gpu.usable for gpu in GPUS.values() if gpu.kind == kind), math.inf)


def installed() -> bool:
    """Returns whether the compiler is installed."""
    return any(map(importlib.util.find_spec, PLUGINS))


def find_devices(name: str, count: int) -> list[jax.Device]:
    """Returns `count` GPUs of a name in GPUS, for which programs can be compiled.

    Raises UserError if the compiler is missing, or its version is not that of jax.
    """
    if not installed():
        raise UserError(
            "compiling for GPUs needs XLA:GPU, their compiler (no driver and no CUDA): "
            "pip install 'jax[cuda13-local]'"
        )
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # so that it looks for no driver
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=GPUS[name].describe(),
            topology=f"1x1x{count}",  # slices x hosts x GPUs
        )
    except Exception as error:  # jaxlib has no narrower exception
        reason = str(error).splitlines()[0]
        raise UserError(
            f"XLA:GPU does not compile for {name} ({reason}): install the one of jax "
            f"{jax.__version__}, pip install 'jax[cuda13-local]=={jax.__version__}'"
        ) from error
    return list(topology.devices)
