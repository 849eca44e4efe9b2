"""A run on a TPU slice that is not there: does it fit, how fast at best, what helps.

The answer to `--mode=compile`: what the compiler says of the steps' memory, and the
bounds on their speed.

Dims: B streams, L segment.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh

from txl_jax import chips, roofline, sharding
from txl_jax.aot import (
    Compiled,
    compile_auto,
    compile_evaluation,
    compile_train,
    find_vocab,
    replace,
)
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import evaluation_model
from txl_jax.hlo import Program
from txl_jax.report.writer import say
from txl_jax.workdir import fit_mesh

Trial = tuple[int, bool, int]  # a count, whether it fits, and its bytes


def search(
    fits: Callable[[int], tuple[bool, int]],
    capacity: float,
    known: Iterable[Trial] = (),
) -> int:
    """Returns the greatest count for which fits(count) -> (it does, bytes); 0 if none.

    Bytes grow about in proportion to the count: a guess is where the line through the
    two newest trials meets the capacity. What the compiler states and what it takes
    differ at times. So where the line points to a count that fits, and none is known
    that does not, guesses go on in doubling steps; and where it does not halve the
    range that is left, the middle is tried. The `known` trials need not be made.
    """
    low, high, tried = 0, 0, []
    count, before, stride, width = 1, iter(known), 1, math.inf
    while not high or high - low > 1:
        count, good, size = next(before, None) or (count, *fits(count))
        tried.append((count, size))
        low = max(low, count) if good else low
        high = high if good else min(high or count, count)
        slope = tried[-1][1] / count
        if len(tried) > 1 and tried[-1][0] != tried[-2][0]:
            (c0, s0), (c1, s1) = tried[-2:]
            slope = max((s1 - s0) / (c1 - c0), slope / 8)
        count = int(count + (capacity - size) / max(slope, 1))
        if not high:
            stride = 2 * stride if count <= low else 1
            count = min(max(count, low + stride), 4 * low + 4)
        elif high - low > width / 2:
            count = (low + high) // 2
        else:
            count = min(max(count, low + 1), high - 1)
        width = high - low if high else math.inf
    return low


def largest_batch(
    config: Config,
    devices: list[Any],
    part: chips.Slice,
    known: Iterable[Trial] = (),
) -> Config:
    """Returns the config with the most streams per chip that fit.

    known: trials made before; their counts are of train.batch_chunk streams per chip.
    """
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

    found = search(fits, part.chip.hbm, known)
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
    by_path = program.hbm_bytes()
    traffic = sum(by_path.values()) / calls
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
        "hbm_traffic_by_scope": {
            name: int(size / calls) for name, size in by_scope(by_path).items()
        },
        "collectives": {
            kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sizes
        },
    }


# The parts of the model, as its modules and named scopes call them.
SCOPES = re.compile(
    r"embedding\.embed|embedding\.nll|attention|feed_forward|memory|TransformerXL"
)


def by_scope(by_path: dict[str, float]) -> dict[str, float]:
    """Returns bytes by the innermost part of the model, the most first.

    "layers" are what goes from layer to layer, and what the forward pass keeps for the
    backward pass; "update" is all that is outside of the model: the gradients' sums and
    norm, the optimiser and the guard; "unnamed" the compiler says nothing of.
    """
    found: dict[str, float] = defaultdict(float)
    for path, size in by_path.items():
        *_, name = ["update" if path else "unnamed", *SCOPES.findall(path)]
        found["layers" if name == "TransformerXL" else name] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
