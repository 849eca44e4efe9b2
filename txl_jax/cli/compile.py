"""The mode `compile`: memory and speed bounds on a TPU slice, without TPUs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from txl_jax.aot import chips
from txl_jax.aot.estimate import Work, estimate
from txl_jax.aot.lower import Compiled
from txl_jax.cli.steps import (
    compile_auto,
    compile_evaluation,
    compile_train,
    find_vocab,
    replace,
)
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.evaluate.options import evaluation_model
from txl_jax.report.log import say
from txl_jax.workdir.fit import fit_mesh


def run(config: Config) -> dict[str, Any]:
    """Compiles the steps for compile.topology, and returns their costs."""
    options = config.compile
    tpus = chips.find(options.topology, options.slices)
    devices = chips.find_devices(tpus)
    config = find_vocab(config)
    done: Compiled | None = None
    candidates: list[dict[str, Any]] = []
    if options.search:
        config, done, candidates = search_policies(config, devices, tpus)
    elif options.streams_per_chip < 0:
        config, done = largest_batch(config, devices, tpus)
    elif options.streams_per_chip:
        size = options.streams_per_chip * tpus.chips
        config = replace(config, "train", batch_size=size)
    if options.mesh == "auto" and not options.search:
        config, done = compile_auto(config, devices)
    done = done or compile_train(config, devices)
    mesh, model, train = fit_mesh(config, devices), config.model, config.train
    result = {
        "topology": tpus.name,
        "slices": tpus.slices,
        "chips": tpus.chips,
        "cores": tpus.chips * tpus.chip.cores,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "kernel": model.kernel,
        "dtype": model.dtype,
        "remat_policy": model.remat_policy,
        "batch_size": train.batch_size,
        "streams_per_chip": train.batch_size / tpus.chips,
        **estimate_training(config, tpus, mesh, done),
    }
    if candidates:
        result["candidates"] = candidates
    if not done.fits:
        result["knobs"] = knobs(config)
    lengths = config.eval.streams, config.eval.tgt_len, config.eval.ext_len
    work = Work(evaluation_model(model, config.eval), *lengths, False)
    try:
        cost = estimate(tpus, mesh, compile_evaluation(config, devices), work)
        result["evaluation"] = {"streams": config.eval.streams, **cost}
    except UserError as error:
        result["evaluation"] = {"error": str(error)}
    for line in table(result):
        say(line)
    return result


def estimate_training(
    config: Config, tpus: chips.Slices, mesh: Mesh, done: Compiled
) -> dict[str, Any]:
    """Returns the costs of a compiled training step."""
    train = config.train
    lengths = train.batch_size, train.tgt_len, train.ext_len
    repeats = train.batch_chunk, train.segments_per_update, train.updates_per_call
    work = Work(config.model, *lengths, True, *repeats)
    return estimate(tpus, mesh, done, work)


def search_policies(
    config: Config, devices: list[Any], tpus: chips.Slices
) -> tuple[Config, Compiled, list[dict[str, Any]]]:
    """Returns the fastest config that fits, its compiled step and all candidates.

    For each remat policy: the least-split mesh on which any streams fit, and the most
    streams that fit there. The fastest has the most tokens per second without overlap
    of products, memory traffic and exchanges.
    """
    unit = config.train.batch_chunk * tpus.chips
    candidates, found = [], []
    for policy in ("none", "dots", "full"):
        tried = replace(config, "model", remat_policy=policy)
        smallest = replace(tried, "train", batch_size=unit)
        try:
            mesh = compile_auto(smallest, devices)[0].mesh
            tried, done = largest_batch(
                dataclasses.replace(tried, mesh=mesh), devices, tpus
            )
        except UserError as error:
            say(f"remat_policy = {policy}: {error}")
            continue
        cost = estimate_training(tried, tpus, fit_mesh(tried, devices), done)
        rate = cost["tokens_per_second"]["no_overlap"]
        candidates.append(
            {
                "remat_policy": policy,
                "mesh": dict(fit_mesh(tried, devices).shape),
                "streams_per_chip": tried.train.batch_size / tpus.chips,
                "hbm_bytes": done.bytes,
                "tokens_per_second": rate,
            }
        )
        found.append((rate, tried, done))
        say(f"remat_policy = {policy}: at least {rate:,.0f} tokens per second")
    if not found:
        raise UserError(
            f"no remat policy and mesh fit on {tpus.name}: use a larger slice, or "
            "--config.model.dtype=bfloat16"
        )
    _, best, done = max(found, key=lambda each: each[0])
    return best, done, candidates


def largest_batch(
    config: Config, devices: list[Any], tpus: chips.Slices
) -> tuple[Config, Compiled]:
    """Returns the config with the most streams per chip that fit, and its step."""
    unit = config.train.batch_chunk
    fitting: dict[int, Compiled] = {}

    def with_streams(count: int) -> Config:
        return replace(config, "train", batch_size=count * unit * tpus.chips)

    def fits(count: int) -> tuple[bool, int]:
        done = compile_train(with_streams(count), devices)
        verb = "fit" if done.fits else "do not fit"
        room = f"{gib(done.bytes)} of {gib(tpus.chip.hbm)}"
        say(f"{count * unit} streams per chip {verb}: {room}")
        if done.fits:
            fitting[count] = done
        return done.fits, done.bytes

    count = search(fits, tpus.chip.hbm)
    if not count:
        raise UserError(
            f"not even {unit} streams per chip fit on {tpus.name} with mesh.model = "
            f"{max(config.mesh.model, 1)}: {knobs(with_streams(1))}"
        )
    return with_streams(count), fitting[count]


def search(fits: Callable[[int], tuple[bool, int]], capacity: float) -> int:
    """Returns the greatest count for which fits(count) is (True, bytes), or 0.

    Bytes grow about linearly with the count, so the next guess is where the line
    through the two newest trials meets the capacity. The bytes that the compiler states
    can differ from those that it allows. Therefore, while no count is known not to fit
    and the line suggests one that is known to fit, the guesses grow in doubling steps;
    and if a guess does not halve the remaining range, the next one is its middle.
    """
    low = high = last = before = 0
    count, stride, width = 1, 1, math.inf
    while not high or high - low > 1:
        good, size = fits(count)
        low = count if good else low
        high = high if good else count
        slope = size / count
        if last:
            slope = max((size - before) / (count - last), slope / 8)
        last, before = count, size
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


def knobs(config: Config) -> str:
    """Returns flags that lower the memory use."""
    model = config.model
    einsum = model.kernel == "xla" and model.position == "transformer_xl"
    flags = {
        "model.remat_policy=full": model.remat_policy != "full",
        "model.kernel=tpu": einsum,
        f"mesh.fsdp={max(config.mesh.fsdp, 1) * 2}": True,
        f"train.batch_chunk={config.train.batch_chunk * 2}": True,
        "model.dtype=bfloat16": model.dtype == "float32",
    }
    names = ", ".join(f"--config.{flag}" for flag, helps in flags.items() if helps)
    return f"{names} or fewer --streams_per_chip may help"


def gib(size: float) -> str:
    """Formats bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def table(result: dict[str, Any]) -> list[str]:
    """Returns the main results as lines of text."""
    lines = [
        f"{result['slices']} x "
        * (result["slices"] > 1)
        + f"{result['topology']}: {result['chips']} chips, {result['cores']} cores, "
        f"{result['devices']} devices, mesh {result['mesh']}",
    ]
    for name, step in (("training", result), ("evaluation", result["evaluation"])):
        if "error" in step:
            lines.append(f"{name:>12}  {step['error']}")
            continue
        room = f"{gib(step['hbm_bytes'])} of {gib(step['hbm_capacity_bytes'])}"
        if not step["fits"]:
            over = gib(step["exceeds_by_bytes"])
            lines.append(f"{name:>12}  out of memory: {room}, {over} too much")
            continue
        lines.append(f"{name:>12}  fits: {room}; limit: {step['limit']}")
        for label, field, scale, unit in (
            ("time of a step", "step_seconds", 1e3, "ms"),
            ("tokens per second", "tokens_per_second", 1, ""),
            ("utilisation", "utilisation", 100, "%"),
        ):
            low, high = sorted(value * scale for value in step[field].values())
            lines.append(f"{label:>28}  {low:,.2f} to {high:,.2f} {unit}")
        for kind, each in step["collectives"].items():
            total = f"{each['count']} of {each['bytes'] / 1e6:,.1f} MB in total"
            lines.append(f"{kind:>28}  {total}")
        if result["slices"] > 1:
            share = f"{step['cross_slice_share']:.0%} of a step without overlap"
            lines.append(f"{'data-center network':>28}  {share}")
    if "knobs" in result:
        lines.append(f"{'':>12}  {result['knobs']}")
    return lines
