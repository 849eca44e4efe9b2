"""Compiles a jitted step ahead of time for devices that need not be attached.

libtpu compiles on any machine, from shapes instead of arrays.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.errors import JaxRuntimeError
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from txl_jax.checkpoint.save_restore import abstract
from txl_jax.errors import UserError
from txl_jax.model.segment import Segment
from txl_jax.report.progress import Lowers
from txl_jax.sharding.rules import sharding


class Compiled(NamedTuple):
    """A compiled step; bytes are of one device's HBM."""

    fits: bool
    bytes: int
    seconds: float  # of compilation
    text: str = ""  # the compiled program; libtpu makes none that does not fit
    aliased: int = 0  # bytes of results that reuse the memory of arguments


def abstract_segments(mesh: Mesh, S: int, B: int, L: int) -> Segment:
    """Returns the shapes and shardings of a batch of segments on the mesh."""

    def array(dtype: str, *shape: int) -> Any:
        place = sharding(mesh, "SBL"[: len(shape)])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    tokens_SBL, first_SBL = array("int32", S, B, L), array("bool", S, B, L)
    weights_SBL, length_SB = array("float32", S, B, L), array("int32", S, B)
    return Segment(tokens_SBL, tokens_SBL, weights_SBL, first_SBL, length_SB)


def abstract_result(function: jax.stages.Wrapped, *args: object) -> Any:
    """Returns the shapes and shardings of a jitted function's result."""
    shapes = jax.eval_shape(function, *args)
    with uncached():
        places = compile_for(function, *args).output_shardings
    return abstract(shapes, places)


def compile_for(function: Lowers, *args: object) -> jax.stages.Compiled:
    """Compiles a jitted function for the devices of its abstract arguments."""
    return function.lower(*args).compile()


def compile_step_for(mesh: Mesh, step: Lowers, *args: object) -> Compiled:
    """Compiles a jitted step for abstract arguments, and returns its memory use."""
    started = time.perf_counter()
    try:
        # The choice of a kernel depends on the mesh's devices.
        with jax.set_mesh(mesh), uncached():
            program = compile_for(step, *args)
    except JaxRuntimeError as error:
        wanted = memory_wanted(str(error))
        if not wanted:
            raise
        return Compiled(False, wanted, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    size, aliased = memory_used(program)
    return Compiled(True, size, seconds, text_of(program), aliased)


def memory_used(program: jax.stages.Compiled) -> tuple[int, int]:
    """Returns a compiled program's bytes of a device, and those of reused arguments."""
    use = program.memory_analysis()
    assert use is not None
    aliased = use.alias_size_in_bytes
    size = use.argument_size_in_bytes + use.output_size_in_bytes - aliased
    size += use.temp_size_in_bytes + use.generated_code_size_in_bytes
    return size, aliased


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


def text_of(program: Any) -> str:
    """Returns the text of a compiled program.

    Raises UserError if this jaxlib cannot read the output of this libtpu.
    """
    try:
        return program.as_text()
    except JaxRuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(
            f"the step was compiled, but jaxlib {jaxlib.__version__} cannot read the "
            f"program of this libtpu ({reason}): install the matching libtpu with "
            "pip install 'jax[tpu]'"
        ) from error


def memory_wanted(message: str) -> int:
    """Returns the bytes named in the compiler's out-of-memory message, or 0."""
    size = r"(?:Used |\()([\d.]+)([KMGT]?)(?: of|\) exceeds)"
    match = re.search(size, message)
    if "RESOURCE_EXHAUSTED" not in message or not match:
        return 0
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))
