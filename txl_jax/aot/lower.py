"""Compiles programs ahead of time for TPU slices that need not be attached.

libtpu compiles on any machine, from shapes instead of arrays. Chips, cores and devices
differ: a chip of v3, v4 or v5p has two cores. On v3 each core is a device with half of
the chip's memory; on v4 and v5p both cores are one device ("megacore").
"""

import contextlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from txl_jax.errors import UserError, require_one_of
from txl_jax.runtime.programs import Lowerable
from txl_jax.sharding.rules import abstract

GIB = 2**30


class Chip(NamedTuple):
    """One chip with all its cores.

    hbm: bytes, the limit that libtpu 0.0.51 reports for programs that do not fit. It is
    slightly less than the chip's memory.
    """

    hbm: float
    axes: int
    cores: int = 1


CHIPS = {
    "v3": Chip(15.48 * GIB, 2, 2),
    "v4": Chip(30.75 * GIB, 3, 2),
    "v5e": Chip(15.75 * GIB, 2),
    "v5p": Chip(95.73 * GIB, 3, 2),
    "v6e": Chip(31.24 * GIB, 2),
}
# Without these, libtpu looks for the host of a TPU.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Slices(NamedTuple):
    """Equal blocks of chips of one kind, joined by the data-center network."""

    name: str  # a block's
    chip: Chip
    chips: int  # in all blocks
    slices: int


def find_slices(name: str, count: int = 1) -> Slices:
    """Returns `count` slices of a topology name: "v4:4x4x8" is 128 chips of v4."""
    chip_name, _, sizes = name.partition(":")
    require_one_of(chip_name, list(CHIPS), "the chip of compile.topology")
    chip = CHIPS[chip_name]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
        raise UserError(
            f"compile.topology = {name!r}: give {chip.axes} lengths for a slice of "
            f"{chip_name}, such as {chip_name}:{'x'.join('4' * chip.axes)}"
        )
    if count > 1 and chip_name == "v3":
        raise UserError(f"compile.slices = {count}: {chip_name} has one slice only")
    return Slices(name, chip, count * math.prod(map(int, sizes.split("x"))), count)


def find_devices(tpus: Slices) -> list[jax.Device]:
    """Returns the devices of the slices; programs can be compiled for them.

    Raises UserError if libtpu, the compiler, is missing or rejects them.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for TPUs needs libtpu, their compiler: pip install 'jax[tpu]'"
        )
    config: dict[str, str | int] = {}
    if tpus.name.startswith("v4"):
        config["chip_config_name"] = "megacore"
    if tpus.slices > 1:
        config["num_slices"] = tpus.slices
    added = ENVIRONMENT.keys() - os.environ.keys()
    os.environ |= {name: ENVIRONMENT[name] for name in added}
    try:
        topology = topologies.get_topology_desc(tpus.name, platform="tpu", **config)
    except Exception as error:  # jaxlib has no narrower exception
        reason = str(error).splitlines()[0]
        raise UserError(
            f"compile.topology = {tpus.name!r} is not a slice of TPUs: {reason}"
        ) from error
    finally:  # libtpu has read them
        for name in added:
            del os.environ[name]
    return list(topology.devices)


class Compiled(NamedTuple):
    """The result of compiling a step; bytes are in one device's HBM."""

    bytes: int
    seconds: float  # compilation time
    program: jax.stages.Compiled | None  # None if it does not fit


def abstract_result(function: jax.stages.Wrapped, *args: object) -> Any:
    """Returns the shapes and shardings of a jitted function's result."""
    with uncached():
        places = function.lower(*args).compile().output_shardings
    return abstract(jax.eval_shape(function, *args), places)


def compile_step_for(mesh: Mesh, step: Lowerable, *args: object) -> Compiled:
    """Compiles a step for abstract arguments, and returns its memory use."""
    started = time.perf_counter()
    try:
        # The choice of a kernel depends on the mesh's devices.
        with jax.set_mesh(mesh), uncached():
            program = step.lower(*args).compile()
    except JaxRuntimeError as error:
        wanted = memory_wanted(str(error))
        if not wanted:
            raise
        return Compiled(wanted, time.perf_counter() - started, program=None)
    use = program.memory_analysis()
    assert use is not None
    size = use.argument_size_in_bytes + use.output_size_in_bytes
    size += use.temp_size_in_bytes + use.generated_code_size_in_bytes
    size -= use.alias_size_in_bytes
    return Compiled(size, time.perf_counter() - started, program)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disables the compilation cache, which cannot load programs of absent devices."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def memory_wanted(message: str) -> int:
    """Returns the bytes named in the compiler's out-of-memory message, or 0."""
    size = r"(?:Used |\()([\d.]+)([KMGT]?)(?: of|\) exceeds)"
    match = re.search(size, message)
    if "RESOURCE_EXHAUSTED" not in message or not match:
        return 0
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))
