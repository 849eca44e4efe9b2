"""TPU chips and slices, with the memory of each.

Chips, cores and devices differ. A TPU chip of v3, v4 or v5p has two cores. On v3 each
core is a device with half of the chip's memory; on v4 and v5p both cores are one device
("megacore"). v5e and v6e have one core.
"""

import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax

from txl_jax.errors import UserError, require_one_of

GIB = 2**30


class Chip(NamedTuple):
    """One chip with all its cores.

    hbm: bytes; the limit that libtpu 0.0.51 reports for a program that exceeds it,
    slightly less than the chip's memory.
    """

    hbm: float
    axes: int
    multislice: bool
    cores: int = 1
    config: str = ""  # of libtpu, which has several for v4


CHIPS = {
    "v3": Chip(15.48 * GIB, 2, False, 2),
    "v4": Chip(30.75 * GIB, 3, True, 2, config="megacore"),
    "v5e": Chip(15.75 * GIB, 2, True),
    "v5p": Chip(95.73 * GIB, 3, True, 2),
    "v6e": Chip(31.24 * GIB, 2, True),
}


class Slices(NamedTuple):
    """Equal blocks of chips of one kind, joined by the data-center network."""

    name: str  # of one block
    chip: Chip
    chips: int  # of all blocks
    slices: int


def find(name: str, count: int = 1) -> Slices:
    """Returns `count` slices of a topology name: "v4:4x4x8" is 128 chips of v4."""
    kind, _, sizes = name.partition(":")
    require_one_of(kind, list(CHIPS), "the chip of compile.topology")
    chip = CHIPS[kind]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
        raise UserError(
            f"compile.topology = {name!r}: give {chip.axes} lengths for a slice of "
            f"{kind}, such as {kind}:{'x'.join('4' * chip.axes)}"
        )
    if count > 1 and not chip.multislice:
        raise UserError(f"compile.slices = {count}: {kind} has one slice only")
    return Slices(name, chip, count * math.prod(map(int, sizes.split("x"))), count)


# Without these, libtpu looks for the host of a TPU.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def find_devices(tpus: Slices) -> list[jax.Device]:
    """Returns the devices of the slices, for which programs can be compiled.

    Raises UserError if libtpu, the compiler, is missing or rejects them.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for TPUs needs libtpu, their compiler: pip install 'jax[tpu]'"
        )
    from jax.experimental import topologies

    os.environ.update(ENVIRONMENT | os.environ)
    jax.config.update("jax_platforms", "cpu")  # compiling needs no TPU backend
    config: dict[str, str | int] = {}
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
