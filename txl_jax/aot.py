"""Compiling a run's steps for TPUs that are not there, ahead of time.

The training step and the evaluation step are those that `train` and `evaluate` run,
given shapes instead of arrays. libtpu compiles them as it would on the pod.

Dims: S segments in a call, U updates in a call, B streams, L segment.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from txl_jax import sharding
from txl_jax.checkpoint import abstract
from txl_jax.config import Config
from txl_jax.data.facts import CORPORA
from txl_jax.data.streams import SLACK, Segment
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import make_steps
from txl_jax.sharding import MeshConfig
from txl_jax.train import make_step
from txl_jax.workdir import fit_mesh


class Compiled(NamedTuple):
    """A step, compiled or too large to be; bytes are of one device's HBM."""

    text: str  # the compiled program, "" where it does not fit
    bytes: int
    seconds: float  # that compiling took
    aliased: int = 0  # bytes of results that take the place of arguments

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return bool(self.text)


def find_vocab(config: Config) -> Config:
    """Returns the config with model.vocab_size set, without reading the corpus."""
    data, model = config.data, config.model
    if model.vocab_size:
        return config
    corpus = CORPORA.get(data.corpus.partition(":")[0])
    own = not any(
        (data.vocab_path, data.vocab_size, data.min_count, data.convention)
    ) and data.vocab in ("corpus", corpus.vocab if corpus else "corpus")
    size = 256 if data.vocab == "byte" else corpus.vocab_size if corpus and own else 0
    if not size:
        raise UserError(
            f"the size of this vocabulary of data.corpus = {data.corpus!r} is known "
            "when it is made: give --config.model.vocab_size=N"
        )
    return replace(config, "model", vocab_size=size)


def replace(config: Config, section: str, **fields: Any) -> Config:
    """Returns the config with fields of a section changed."""
    changed = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: changed})


# Meshes


def meshes(config: Config, devices: list[Any]) -> Iterator[MeshConfig]:
    """Yields meshes that streams and model divide over, the least split model first."""
    n, train = len(devices), config.train
    for model in (m for m in range(1, n + 1) if n % m == 0):
        streams, uneven = divmod(train.batch_size // train.batch_chunk, n // model)
        if uneven or not streams:
            continue
        for fsdp in (f for f in range(1, n // model + 1) if n // model % f == 0):
            mesh = MeshConfig(-1, fsdp, model)
            try:
                fit_mesh(dataclasses.replace(config, mesh=mesh), devices)
            except UserError:
                continue
            yield mesh


def check_mesh(config: Config, devices: list[Any]) -> Mesh:
    """Returns the config's mesh; raises UserError, with one that works, if need be."""
    train = config.train
    mesh = fit_mesh(config, devices)
    shards = sharding.stream_shards(mesh)
    if train.batch_size // train.batch_chunk % shards:
        whole = f"train.batch_size = {train.batch_size}"
        if train.batch_chunk > 1:
            whole += f" in {train.batch_chunk} chunks"
        near = next(meshes(config, devices), None)
        mend = f"take --streams_per_chip={max(train.batch_size // len(devices), 1)}"
        if near:
            mend = f"--config.mesh.model={near.model} works, and --mesh=auto finds it"
        raise UserError(
            f"{whole} does not divide over the {shards} shards of mesh.data x "
            f"mesh.fsdp on {config.compile.topology}: {mend}"
        )
    return mesh


def compile_auto(config: Config, devices: list[Any]) -> tuple[Config, Compiled]:
    """Returns the config with the least split mesh that fits, and the training step."""
    found = None
    for mesh in meshes(config, devices):
        if mesh.fsdp & (mesh.fsdp - 1) or found and mesh.model > found[0].mesh.model:
            continue  # powers of two alone, and no more of `model` than divides
        given = dataclasses.replace(config, mesh=mesh)
        found = given, compile_train(given, devices)
        if found[1].fits:
            break
    if not found:
        check_mesh(replace(config, "mesh", data=-1, fsdp=1, model=1), devices)
        raise UserError(f"no mesh of {config.compile.topology} divides this model")
    return found


# Steps


def segments(mesh: Mesh, S: int, B: int, width: int) -> Segment:
    """Returns the shapes of what Streams yields, and where it lives."""

    def array(letters: str, dtype: str) -> Any:
        sizes = {"S": S, "B": B, "L": width}
        shape = tuple(sizes[letter] for letter in letters)
        place = sharding.sharding(mesh, letters)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    return Segment(
        inputs_SBL=array("SBL", "int32"),
        targets_SBL=array("SBL", "int32"),
        weights_SBL=array("SBL", "float32"),
        first_SBL=array("SBL", "bool"),
        length_SB=array("SB", "int32"),
    )


def compile_train(config: Config, devices: list[Any]) -> Compiled:
    """Compiles the training step."""
    mesh = check_mesh(config, devices)
    return compile_step(mesh, lambda: trace_train(config, mesh).lower())


def trace_train(config: Config, mesh: Mesh) -> Any:
    """Returns the training step, traced for the mesh."""
    train = config.train
    init, places, step = make_step(config, mesh)
    state = abstract(jax.eval_shape(init), places)
    width = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    given = segments(mesh, train.segments_per_call, train.batch_size, width)
    return step.trace(state, given)


def check_kernel(config: Config, mesh: Mesh) -> None:
    """Raises UserError where the named kernel cannot serve the training step."""
    if config.model.kernel not in ("auto", "xla"):
        trace_train(config, mesh)


def compile_evaluation(config: Config, devices: list[Any]) -> Compiled:
    """Compiles the evaluation step; raises UserError if streams do not divide."""
    how, mesh = config.eval, fit_mesh(config, devices)
    sharding.check_streams(mesh, how.streams, "eval.streams")
    init, places, _ = make_step(config, mesh)
    params = abstract(jax.eval_shape(init).params, places.params)
    apart, empty, step = make_steps(config.model, how, mesh)
    with jax.set_mesh(mesh):
        params = placed(apart, params)
        memory = placed(empty, params)
    given = segments(mesh, 1, how.streams, how.ext_len + how.tgt_len)
    return compile_step(mesh, lambda: step.lower(params, memory, given))


def placed(function: Any, *args: Any) -> Any:
    """Returns the shapes of a jitted function's results, and where they will live."""
    shapes = jax.eval_shape(function, *args)
    return abstract(shapes, function.lower(*args).compile().output_shardings)


def compile_step(mesh: Mesh, lower: Callable[[], Any]) -> Compiled:
    """Compiles what `lower` gives, or says how much memory it would want."""
    started = time.perf_counter()
    try:
        with jax.set_mesh(mesh):  # which tells kernels the kind of device
            program = lower().compile()
    except JaxRuntimeError as error:
        wanted = memory_wanted(str(error))
        if not wanted:
            raise
        return Compiled("", wanted, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    use = program.memory_analysis()
    size = use.argument_size_in_bytes + use.output_size_in_bytes
    size += use.temp_size_in_bytes + use.generated_code_size_in_bytes
    size -= use.alias_size_in_bytes
    return Compiled(text_of(program), size, seconds, use.alias_size_in_bytes)


def text_of(program: Any) -> str:
    """Returns the compiled text; raises UserError where this jaxlib cannot read it."""
    try:
        return program.as_text()
    except JaxRuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(
            f"the step was compiled, but jaxlib {jaxlib.__version__} cannot read what "
            f"this libtpu made of it ({reason}): pip install 'jax[tpu]', which brings "
            "the libtpu of this jax"
        ) from error


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_wanted(message: str) -> int:
    """Returns the bytes in the compiler's message that memory runs out, or 0."""
    if "RESOURCE_EXHAUSTED" not in message:
        return 0
    for words in (r"Used ([\d.]+)([KMGT]?) of", r"\(([\d.]+)([KMGT]?)\) exceeds"):
        if found := re.search(words, message):
            return int(float(found[1]) * UNITS[found[2]])
    return 0
