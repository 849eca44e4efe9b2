"""The FLOPs of a step, peak rates, and lower bounds on a step's time on a slice.

Each bound (products, HBM, interconnect, network) is the work of the step divided by the
chip's rate. If all of them overlap, the step takes at least the greatest; if none
overlap, at least their sum. The work of the vector units (softmax, dropout, norms) is
not included.
"""

import functools
import re
import timeit
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from txl_jax.aot.chips import CHIPS, KINDS, Slices
from txl_jax.aot.gpus import GPUS
from txl_jax.aot.traffic import CROSS_SLICE, Collective
from txl_jax.model.config import REMAT_NAMES, ModelConfig
from txl_jax.model.flops import EVALUATION, NEEDED, products

# How often a device computes each kind of `model.flops`, with recomputed scores.
TRAINING = (3, 2, 4)
REMAT = (4, 3, 4)
# By remat policy; others: REMAT.
LAYERS = {"none": NEEDED, f"save:{','.join(REMAT_NAMES)}": TRAINING, "dots": TRAINING}


def device_flops(
    config: ModelConfig, B: float, L: int, model_shards: int, training: bool = True
) -> float:
    """Returns the FLOPs of one device for a segment of its B streams.

    Layers are divided over the model shards. The vocabulary is not: every device scores
    the tokens of its streams against all of it.
    """
    layers, vocabulary = products(config, B, L, training)
    if not training:
        return float((layers / model_shards + vocabulary) @ EVALUATION)
    own = layers @ LAYERS.get(config.remat_policy, REMAT)
    return float(own / model_shards + vocabulary @ TRAINING)


# Of one jax device, for dense bfloat16 products (float16 on T4): the chips of `chips`,
# and others by Google's page of v2, whose devices are cores, and by NVIDIA's data
# sheets, without sparsity, read in November 2026.
PEAK_FLOPS = {
    **{kind: CHIPS[name].flops / CHIPS[name].devices for kind, name in KINDS.items()},
    **{name.upper(): gpu.flops for name, gpu in GPUS.items()},
    **{"TPU v2": 22.5e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12},
    **{"L4": 121e12, "T4": 65e12},
}
# Sizes of the matrices whose product is timed where no peak is known: it must take much
# longer than its dispatch.
CPU_SIZE, SIZE = 1024, 8192
REPEATS = 6  # the first one compiles


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


# A hop takes about a microsecond (the book cited in `chips`, scaling-book/sharding,
# "A note on ICI latency").
HOP = 1e-6


def exchange_seconds(
    tpus: Slices, collective: Collective, coords: Sequence[tuple[int, ...]]
) -> float:
    """Returns the time of one run of a collective; coords are the devices' chips.

    The model is that of scaling-book/sharding. A gather or scatter of V bytes over n
    devices moves V (n - 1) / n bytes through each chip, along all axes in which the
    devices differ at once. An all-reduce is a scatter and a gather. An all-to-all takes
    a quarter of the time of a gather of all devices' bytes. The farthest of n devices
    is n / 2 hops away in a ring and n in a line. Through a switch, gathers and scatters
    are rings too, and each device sends its part of an all-to-all at once; a switch
    that adds up what passes through it (H100 and later) may halve an all-reduce.
    """
    chips = [coords[place] for place in collective.group]
    lengths = [len(set(places)) for places in zip(*chips, strict=True)]
    axes = [a for a, length in enumerate(lengths) if length > 1]
    n = len(set(chips))
    if not axes:  # the cores of one chip
        return 0.0
    if collective.kind == "collective-permute":
        return HOP + collective.bytes / tpus.chip.link
    width = sum(tpus.bandwidth(a) for a in axes)
    hops = sum(lengths[a] * tpus.chip.link / tpus.bandwidth(a) for a in axes)
    if collective.kind == "all-to-all" and tpus.chip.wraps:
        return max(hops * HOP, collective.bytes * n / (4 * width))
    through = max(hops * HOP, collective.bytes * (n - 1) / n / width)
    return 2 * through if collective.kind == "all-reduce" else through


def bounds(
    tpus: Slices,
    flops: float,
    hbm_bytes: float,
    collectives: Iterable[Collective],
    coords: Sequence[tuple[int, ...]],
) -> dict[str, float]:
    """Returns the seconds of one device's products, HBM traffic and collectives.

    "network" is what slices exchange through the data-center network. On v3 a device is
    a core, with half of the chip's FLOPs and memory bandwidth.
    """
    chip = tpus.chip
    seconds: dict[str, float] = {"interconnect": 0.0, "network": 0.0}
    for each in collectives:
        if each.kind == CROSS_SLICE:
            # Each chip all-reduces its part of an array with its peers.
            sent = 2 * (tpus.slices - 1) / tpus.slices * each.bytes
            seconds["network"] += each.times * sent / chip.network
        else:
            time = exchange_seconds(tpus, each, coords)
            seconds["interconnect"] += each.times * time
    return {
        "compute": flops * chip.devices / chip.flops,
        "hbm": hbm_bytes * chip.devices / chip.hbm_bandwidth,
        **seconds,
    }
