"""What the machine is, and its peaks: a matrix product, and reading and writing."""

import functools
import importlib.util
import platform as platform_module
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import record
from experiments.benchmarks.chip.timing import memory_bytes, seconds_of
from txl_jax.report.peak import known_peak
from txl_jax.runtime.programs import usable_cores

# Bytes per second of a device's memory as specified, read in November 2026: Google's
# page of each chip, of which a device of v3 is half.
BANDWIDTH = {
    **{"TPU v3": 450e9, "TPU v4": 1200e9, "TPU v5 lite": 819e9, "TPU v5": 2765e9},
    **{"TPU v6 lite": 1638e9},
}


def find_torch(platform: str) -> str:
    """Returns torch's name of the device, or "not .." and the reason."""
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return "not installed (extra bench)"
    import torch

    if platform == "cpu":
        return "cpu"
    if platform == "gpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"not on this device: torch {torch.__version__} sees no {platform.upper()}"


def processor() -> str:
    """Returns the model of the CPU and the usable cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line for line in lines if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform_module.processor()
    return f"{model}, {usable_cores()} cores"


def measure(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the facts, then also the peaks, of one device."""
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    facts: dict[str, Any] = {
        "device_kind": kind,
        "platform": platform,
        "count": len(devices),
        "processor": processor(),
        "memory_bytes": memory_bytes(),
        "known_flops": known_peak(kind),
        "known_bandwidth": BANDWIDTH.get(kind, 0),
        "torch": find_torch(platform),
        "versions": record.versions(),
    }
    yield facts
    tiny, cpu = part["tiny"], platform == "cpu"
    size = 64 if tiny else 2048 if cpu else 8192
    for dtype in ("bfloat16", "float32"):
        x = jnp.ones((size, size), dtype)
        multiply = jax.jit(jnp.matmul)
        seconds = seconds_of(functools.partial(multiply, x, x))
        facts[f"{dtype}_flops"] = 2 * size**3 / seconds
    count = 2**14 if tiny else 2**26 if cpu else 2**28
    x, add = jnp.ones(count), jax.jit(lambda x: x + 1)
    facts["bandwidth"] = 2 * x.nbytes / seconds_of(lambda: add(x))
    yield facts
