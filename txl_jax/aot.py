"""Compiling a run's steps for TPUs that are not there: do they fit, how fast at best.

The training step and the evaluation step are those that `train` and `evaluate` run,
given shapes instead of arrays. libtpu compiles them as it would on the pod.

Dims: S segments in a call, U updates in a call, B streams, L segment.
"""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from txl_jax import chips, roofline, sharding
from txl_jax.checkpoint import abstract
from txl_jax.config import Config
from txl_jax.data.facts import CORPORA
from txl_jax.data.streams import SLACK, Segment
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import evaluation_model, make_steps
from txl_jax.hlo import Program
from txl_jax.report.writer import say
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
    """Returns the config's mesh; raises UserError, with one that works, if it cannot."""
    train = config.train
    mesh = fit_mesh(config, devices)
    shards = sharding.stream_shards(mesh)
    if train.batch_size // train.batch_chunk % shards:
        whole = f"train.batch_size = {train.batch_size}"
        if train.batch_chunk > 1:
            whole += f" in {train.batch_chunk} chunks"
        near = next(meshes(config, devices), None)
        mend = (
            f"--config.mesh.model={near.model} divides"
            if near
            else f"--streams_per_chip={max(train.batch_size // len(devices), 1)} does"
        )
        raise UserError(
            f"{whole} does not divide over the {shards} shards of mesh.data x "
            f"mesh.fsdp on {config.compile.topology}: {mend}, and --mesh=auto finds it"
        )
    return mesh


def compile_auto(config: Config, devices: list[Any]) -> tuple[Config, Compiled]:
    """Returns the training step on the least split mesh that it fits, and the config."""
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
    train = config.train
    mesh = check_mesh(config, devices)
    init, places, step = make_step(config, mesh)
    state = abstract(jax.eval_shape(init), places)
    width = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    given = segments(mesh, train.segments_per_call, train.batch_size, width)
    return compile_step(mesh, lambda: step.lower(state, given))


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
    return Compiled(program.as_text(), size, seconds, use.alias_size_in_bytes)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_wanted(message: str) -> int:
    """Returns the bytes in the compiler's message that memory runs out, or 0."""
    if "RESOURCE_EXHAUSTED" not in message:
        return 0
    for words in (r"Used ([\d.]+)([KMGT]?) of", r"\(([\d.]+)([KMGT]?)\) exceeds"):
        if found := re.search(words, message):
            return int(float(found[1]) * UNITS[found[2]])
    return 0


# The largest batch


def search(fits: Callable[[int], tuple[bool, int]], capacity: float) -> int:
    """Returns the greatest count for which fits(count) -> (it does, bytes); 0 if none.

    Bytes grow about in proportion to the count: a guess is where the line through the
    two newest trials meets the capacity, kept between what fits and what does not.
    """
    low, high, tried = 0, 0, []
    count = 1
    while not high or high - low > 1:
        good, size = fits(count)
        tried.append((count, size))
        low, high = (count, high) if good else (low, count)
        slope = tried[-1][1] / count
        if len(tried) > 1 and tried[-1][0] != tried[-2][0]:
            (c0, s0), (c1, s1) = tried[-2:]
            slope = max((s1 - s0) / (c1 - c0), slope / 8)
        guess = int(count + (capacity - size) / max(slope, 1))
        guess = min(max(guess, low + 1), 4 * low + 4)
        count = min(guess, high - 1) if high else guess
    return low


def largest_batch(config: Config, devices: list[Any], part: chips.Slice) -> Config:
    """Returns the config with the most streams per chip that fit."""
    unit = config.train.batch_chunk
    mesh_model = max(config.mesh.model, 1)

    def with_streams(count: int) -> Config:
        size = count * unit * part.chips
        return replace(config, "train", batch_size=size)

    def fits(count: int) -> tuple[bool, int]:
        done = compile_train(with_streams(count), devices)
        verb = "fit" if done.fits else "do not fit"
        say(
            f"{count * unit} streams per chip {verb}: {gib(done.bytes)} "
            f"of {gib(part.chip.hbm)}"
        )
        return done.fits, done.bytes

    found = search(fits, part.chip.hbm)
    if not found:
        raise UserError(
            f"not even {unit} streams per chip fit on {part.name} with mesh.model = "
            f"{mesh_model}: {knobs(with_streams(1))}"
        )
    return with_streams(found)


def knobs(config: Config) -> str:
    """Returns what would lower the memory, as flags."""
    found = []
    if not config.model.remat:
        found.append("--config.model.remat=true")
    if config.model.kernel == "xla" and config.model.position == "transformer_xl":
        found.append("--config.model.kernel=tpu")
    found.append(f"--config.mesh.fsdp={max(config.mesh.fsdp, 1) * 2}")
    found.append(f"--config.train.batch_chunk={config.train.batch_chunk * 2}")
    if config.model.dtype == "float32":
        found.append("--config.model.dtype=bfloat16")
    return ", ".join(found) + " or fewer --streams_per_chip may help"


def gib(size: float) -> str:
    """Returns bytes as GiB, for people."""
    return f"{size / 2**30:.2f} GiB"


# Results


def describe(
    part: chips.Slice, config: Config, mesh: Mesh, done: Compiled, training: bool
) -> dict[str, Any]:
    """Returns what is known of a step: memory, and per update what it takes."""
    capacity = part.chip.hbm
    result: dict[str, Any] = {
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(capacity),
        "donated_bytes": done.aliased,
        "seconds_to_compile": round(done.seconds, 1),
    }
    train, how, model = config.train, config.eval, config.model
    if training:
        B, L, parts = train.batch_size, train.tgt_len, train.batch_chunk
        repeats, calls = train.segments_per_update, train.updates_per_call
        needed = roofline.update_flops(model, B, train.ext_len + L)
    else:
        model = evaluation_model(model, how)
        B, L, parts, repeats, calls = how.streams, how.tgt_len, 1, 1, 1
        needed = roofline.forward_flops(model, B, how.ext_len + L)
    result["flops_per_token"] = needed / (B * L)
    if not done.fits:
        return result | {"exceeds_by_bytes": int(done.bytes - capacity)}

    width = L + (train.ext_len if training else how.ext_len)
    streams = B / parts / sharding.stream_shards(mesh)
    made = parts * roofline.device_flops(
        model, streams, width, mesh.shape["model"], training
    )
    program = Program(done.text)
    found = [each._replace(times=each.times / calls) for each in program.collectives()]
    coords = [tuple(device.coords) for device in mesh.devices.flat]
    traffic = program.hbm_bytes() / calls
    bounds = roofline.bound(part, made * repeats, traffic, found, coords)
    tokens = B * L * repeats
    pair = {"full_overlap": bounds.full_overlap, "no_overlap": bounds.no_overlap}
    whole = needed * repeats / (part.chips * part.chip.flops)
    sizes, counts = Counter[str](), Counter[str]()
    for each in found:
        sizes[each.kind] += int(each.times * each.bytes)
        counts[each.kind] += round(each.times)
    return result | {
        "tokens": tokens,
        "step_seconds": pair,
        "tokens_per_second": {name: tokens / s for name, s in pair.items()},
        "utilisation": {name: whole / s for name, s in pair.items()},
        "limit": bounds.limit,
        "seconds": bounds._asdict(),
        "communication_share": bounds.interconnect / bounds.no_overlap,
        "hbm_traffic_bytes": int(traffic),
        "collectives": {
            kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sizes
        },
    }


def run(config: Config) -> dict[str, Any]:
    """Compiles what config.compile asks for, and returns what the mode prints."""
    how = config.compile
    part = chips.find(how.topology)
    devices = chips.find_devices(part)
    config = find_vocab(config)
    if how.streams_per_chip:
        size = how.streams_per_chip * part.chips
        config = replace(config, "train", batch_size=size)
    if how.largest_batch:
        config = largest_batch(config, devices, part)
    if how.mesh == "auto":
        config, done = compile_auto(config, devices)
    else:
        done = compile_train(config, devices)
    mesh = fit_mesh(config, devices)
    result = {
        "topology": part.name,
        "chips": part.chips,
        "cores": part.chips * part.chip.cores,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "kernel": config.model.kernel,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "batch_size": config.train.batch_size,
        "streams_per_chip": config.train.batch_size / part.chips,
        **describe(part, config, mesh, done, training=True),
    }
    if not done.fits:
        result["knobs"] = knobs(config)
    if how.evaluation:
        try:
            scored = compile_evaluation(config, devices)
            result["evaluation"] = {
                "streams": config.eval.streams,
                **describe(part, config, mesh, scored, training=False),
            }
        except UserError as error:
            result["evaluation"] = {"error": str(error)}
    for line in table(result):
        say(line)
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Returns what a person wants to know first, in lines."""
    lines = [
        f"{result['topology']}: {result['chips']} chips, {result['cores']} cores, "
        f"{result['devices']} devices, mesh {result['mesh']}",
    ]
    for name, step in (("training", result), ("evaluation", result.get("evaluation"))):
        if not step:
            continue
        if "error" in step:
            lines.append(f"{name:>12}  {step['error']}")
            continue
        room = f"{gib(step['hbm_bytes'])} of {gib(step['hbm_capacity_bytes'])}"
        if not step["fits"]:
            over = gib(step["exceeds_by_bytes"])
            lines.append(f"{name:>12}  out of memory: {room}, {over} too much")
            continue
        lines.append(f"{name:>12}  fits: {room}; limit: {step['limit']}")
        for words, field, scale, unit in (
            ("a step takes", "step_seconds", 1e3, "ms"),
            ("tokens a second", "tokens_per_second", 1, ""),
            ("utilisation", "utilisation", 100, "%"),
        ):
            ends = sorted(value * scale for value in step[field].values())
            lines.append(f"{words:>28}  {ends[0]:,.2f} to {ends[1]:,.2f} {unit}")
        for kind, each in step["collectives"].items():
            size = f"{each['bytes'] / 1e6:,.1f} MB"
            lines.append(f"{kind:>28}  {each['count']} of {size} together")
    if "knobs" in result:
        lines.append(f"{'':>12}  {result['knobs']}")
    return lines
