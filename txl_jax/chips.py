"""TPU chips and slices of them by name, without a TPU: facts, each with its source.

Chips, cores and devices are three things. A chip of v3, v4 or v5p has two cores. On v3
each is a device, with half of the chip's memory; on v4 and v5p both are one device
("megacore"), which is what users run. v5e and v6e have one core.

Dims: none.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax

from txl_jax.errors import UserError, require, require_one_of

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What to compile ahead of time, and for which TPUs."""

    topology: str = "v5e:2x4"  # kind of chip and how many along each axis of the slice
    streams_per_chip: int = 0  # sets train.batch_size; 0 = the config's own
    largest_batch: bool = False  # search the most streams per chip that fit
    mesh: str = "config"  # "auto" = the least splitting that divides and fits
    evaluation: bool = True  # compile the evaluation step too

    def __post_init__(self) -> None:
        """Refuses impossible values and combinations, naming the fields."""
        require(self, "compile", 0, "streams_per_chip")
        require_one_of(self.mesh, ["config", "auto"], "compile.mesh")
        if self.largest_batch and self.streams_per_chip:
            raise UserError(
                f"compile.streams_per_chip = {self.streams_per_chip} is what "
                "compile.largest_batch looks for: set one of them alone"
            )


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, all its cores together; bytes are per second where not of memory.

    flops, hbm_bandwidth: Google's page of the chip, cloud.google.com/tpu/docs/v4 and so
    on (peak compute in bfloat16; HBM bandwidth), read in November 2026.
    link: one direction of one link of the interconnect, from the table "ICI BW/link" of
    Austin et al. 2025, How to Scale Your Model, jax-ml.github.io/scaling-book/tpus.
    hbm: what the compiler lets a device use, from libtpu 0.0.51's own message when a
    program exceeds it; a little less than the chip has.
    wraps: an axis of the slice is a ring where its length is a multiple of it (same
    book, same page; the pages of v4 and v5p).
    """

    flops: float
    hbm: float
    hbm_bandwidth: float
    link: float
    axes: int
    wraps: int
    cores: int = 1
    cores_per_device: int = 1
    options: tuple[tuple[str, str], ...] = ()  # what libtpu wants besides the name


MEGACORE = (("chip_config_name", "megacore"),)  # v5p has no other configuration
CHIPS = {
    "v3": Chip(123e12, 15.48 * GIB, 900e9, 1e11, 2, 32, cores=2),
    "v4": Chip(275e12, 30.75 * GIB, 1200e9, 4.5e10, 3, 4, 2, 2, MEGACORE),
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 4.5e10, 2, 16),
    "v5p": Chip(459e12, 95.73 * GIB, 2765e9, 9e10, 3, 4, 2, 2),
    "v6e": Chip(918e12, 31.24 * GIB, 1638e9, 9e10, 2, 16),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one kind in a block."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def devices_per_chip(self) -> int:
        """What jax calls devices: 2 on v3, otherwise 1."""
        return self.chip.cores // self.chip.cores_per_device

    def bandwidth(self, axis: int) -> float:
        """Returns the bytes per second that leave a chip along one axis.

        A ring uses the link in each of its two directions at once, a line one.
        """
        rings = self.shape[axis] % self.chip.wraps == 0
        return self.chip.link * (2 if rings else 1)


def _block(kind: str, number: str) -> str:
    """Returns the usual topology of an accelerator type, as "v4:2x2x4" of v4-32.

    The number counts cores where chips have two, otherwise chips.
    """
    kind = kind.replace("litepod", "e")
    chip = CHIPS[kind]
    doublings = (int(number) // chip.cores).bit_length() - 1
    sizes = [2 ** ((doublings + axis) // chip.axes) for axis in range(chip.axes)]
    sizes.sort(key=lambda size: (size == 1, size))  # 2x2x1, and otherwise 2x2x4
    return f"{kind}:{'x'.join(map(str, sizes))}"


def find(name: str) -> Slice:
    """Returns the slice that a topology's name means, as "v4:4x4x8" 128 chips of v4."""
    kind, _, sizes = name.partition(":")
    if accelerator := re.fullmatch(r"(v3|v4|v5litepod|v5p|v6e)-(\d+)", name):
        raise UserError(
            f"compile.topology = {name!r} is Google's name for a machine: give the "
            f"chips of its slice, as {_block(*accelerator.groups())}"
        )
    require_one_of(kind, list(CHIPS), "the chip of compile.topology")
    chip = CHIPS[kind]
    good = "x".join("4" * chip.axes)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or (
        len(shape := tuple(map(int, sizes.split("x")))) != chip.axes
    ):
        raise UserError(
            f"compile.topology = {name!r}: a slice of {kind} has {chip.axes} lengths, "
            f"as {kind}:{good}"
        )
    return Slice(name, chip, shape)


# libtpu looks for a TPU's host unless it is told what it would find.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
INSTALL = "pip install 'jax[tpu]'"


def find_devices(part: Slice) -> list[Any]:
    """Returns the slice's devices, for which programs can be compiled.

    Raises UserError where libtpu, the compiler, is missing or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compiling for TPUs takes libtpu, their compiler: {INSTALL}")
    from jax.experimental import topologies

    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    jax.config.update("jax_platforms", "cpu")  # nothing is to run on a TPU
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=part.name, **dict(part.chip.options)
        )
    except Exception as error:  # jaxlib has no narrower one
        reason = str(error).splitlines()[0]
        raise UserError(
            f"compile.topology = {part.name!r} is no slice: {reason}"
        ) from error
    return list(topology.devices)
