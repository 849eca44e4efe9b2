"""Chips and slices, with the source of each number; GPUs are those of `gpus`.

Chips, cores and devices differ. A TPU chip of v3, v4 or v5p has two cores. On v3 each
core is a device with half of the chip's memory; on v4 and v5p both cores are one device
("megacore"). v5e, v6e and GPUs have one core here.
"""

import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax

from txl_jax.aot import gpus
from txl_jax.errors import UserError, require_one_of

GIB = 2**30


class Chip(NamedTuple):
    """One chip with all its cores, in FLOPs and bytes per second; hbm is in bytes.

    flops, hbm_bandwidth: Google's page of the chip, cloud.google.com/tpu/docs/v4 and so
    on (peak compute in bfloat16; HBM bandwidth), read in November 2026.
    link: one direction of one interconnect link, from the table "ICI BW/link" of
    Austin et al. 2025, How to Scale Your Model, jax-ml.github.io/scaling-book/tpus.
    hbm: the limit that libtpu 0.0.51 reports for a program that exceeds it, slightly
    less than the chip's memory.
    network: what a chip may send to other slices: the rate of its host's network
    interfaces (Google's pages of v5e and v6e; v5p as in the book, v4 assumed equal)
    divided by the host's chips; 0 = the chip has no multislice.
    wraps: an axis of the slice is a ring if its length is a multiple of this number
    (the same page of the book, and Google's pages of v4 and v5p); 0 = a switch.
    """

    flops: float
    hbm: float
    hbm_bandwidth: float
    link: float
    network: float
    axes: int
    wraps: int
    cores: int = 1
    devices: int = 1  # of jax
    config: str = ""  # of libtpu, which has several for v4


CHIPS = {
    "v3": Chip(123e12, 15.48 * GIB, 900e9, 1e11, 0, 2, 32, 2, 2),
    "v4": Chip(275e12, 30.75 * GIB, 1200e9, 4.5e10, 6.25e9, 3, 4, 2, config="megacore"),
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 4.5e10, 3.125e9, 2, 16),
    "v5p": Chip(459e12, 95.73 * GIB, 2765e9, 9e10, 6.25e9, 3, 4, 2),
    "v6e": Chip(918e12, 31.24 * GIB, 1638e9, 9e10, 12.5e9, 2, 16),
} | {
    name: Chip(gpu.flops, gpu.usable, gpu.bandwidth, gpu.link, 0, 1, 0)
    for name, gpu in gpus.GPUS.items()
}


class Slices(NamedTuple):
    """Equal blocks of chips of one kind, joined by the data-center network."""

    name: str  # of one block
    chip: Chip
    shape: tuple[int, ...]  # of one block
    slices: int = 1

    @property
    def chips(self) -> int:
        """The number of chips in all slices."""
        return self.slices * math.prod(self.shape)

    def bandwidth(self, axis: int) -> float:
        """Returns the bytes per second that a chip sends along one axis.

        A ring uses both directions of the link at once, a line only one.
        """
        wraps = self.chip.wraps
        rings = wraps and self.shape[axis] % wraps == 0
        return self.chip.link * (2 if rings else 1)


def _block(kind: str, number: str) -> str:
    """Returns the usual topology of an accelerator type: "v4:2x2x4" for v4-32.

    The number in a type counts cores for chips with two cores, otherwise chips.
    """
    kind = kind.replace("litepod", "e")
    chip = CHIPS[kind]
    doublings = (int(number) // chip.cores).bit_length() - 1
    sizes = [2 ** ((doublings + axis) // chip.axes) for axis in range(chip.axes)]
    sizes.sort(key=lambda size: (size == 1, size))  # 2x2x1, but 2x2x4
    return f"{kind}:{'x'.join(map(str, sizes))}"


def find(name: str, count: int = 1) -> Slices:
    """Returns `count` slices of a topology name: "v4:4x4x8" is 128 chips of v4.

    "h100:8" is 8 GPUs on one board, in the place that jax gives them: 1 x 1 x 8.
    """
    kind, _, sizes = name.partition(":")
    if accelerator := re.fullmatch(r"(v3|v4|v5litepod|v5p|v6e)-(\d+)", name):
        raise UserError(
            f"compile.topology = {name!r} is an accelerator type: give the topology "
            f"of its slice, such as {_block(*accelerator.groups())}"
        )
    require_one_of(kind, list(CHIPS), "the chip of compile.topology")
    chip = CHIPS[kind]
    if kind in gpus.GPUS and sizes not in map(str, range(1, gpus.NVLINK + 1)):
        raise UserError(
            f"compile.topology = {name!r}: give the number of GPUs that NVLink joins, "
            f"{kind}:1 to {kind}:{gpus.NVLINK}"
        )
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
        raise UserError(
            f"compile.topology = {name!r}: give {chip.axes} lengths for a slice of "
            f"{kind}, such as {kind}:{'x'.join('4' * chip.axes)}"
        )
    if count > 1 and not chip.network:
        raise UserError(f"compile.slices = {count}: {kind} has one slice only")
    shape = tuple(map(int, sizes.split("x")))
    return Slices(name, chip, (1, 1, *shape) if kind in gpus.GPUS else shape, count)


KINDS = {  # by jax's name of a device's kind
    **{"TPU v3": "v3", "TPU v4": "v4", "TPU v5": "v5p", "TPU v5p": "v5p"},
    **{"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e"},
}

# Without these, libtpu looks for the host of a TPU.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def find_devices(tpus: Slices) -> list[Any]:
    """Returns the devices of the slices, for which programs can be compiled.

    Raises UserError if the compiler, libtpu or XLA:GPU, is missing or rejects them.
    """
    if (kind := tpus.name.partition(":")[0]) in gpus.GPUS:
        return gpus.find_devices(kind, tpus.chips)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for TPUs needs libtpu, their compiler: pip install 'jax[tpu]'"
        )
    from jax.experimental import topologies

    os.environ.update(ENVIRONMENT | os.environ)
    jax.config.update("jax_platforms", "cpu")  # compiling needs no TPU backend
    config: dict[str, Any] = {}
    if tpus.chip.config:
        config["chip_config_name"] = tpus.chip.config
    if tpus.slices > 1:
        config["num_slices"] = tpus.slices
    try:
        topology = topologies.get_topology_desc(tpus.name, platform="tpu", **config)
    except Exception as error:  # jaxlib has no narrower exception
        reason = str(error).splitlines()[0]
        raise UserError(
            f"compile.topology = {tpus.name!r} is not a slice of TPUs: {reason}"
        ) from error
    return list(topology.devices)
