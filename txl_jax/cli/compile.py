"""The mode `compile`: memory and speed bounds on absent TPUs or GPUs."""

from collections.abc import Callable
from typing import Any

from txl_jax.aot import chips
from txl_jax.aot.estimate import Work, estimate
from txl_jax.aot.lower import Compiled
from txl_jax.cli import steps
from txl_jax.cli.steps import replace
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.evaluate.options import evaluation_model
from txl_jax.report.log import say
from txl_jax.workdir.fit import fit_mesh

MOST_STREAMS = 512  # per chip, where a search ends: a tiny model would never fill it


def run(config: Config) -> dict[str, Any]:
    """Compiles the steps for compile.topology, and returns their costs."""
    options = config.compile
    tpus = chips.find(options.topology, options.slices)
    devices = chips.find_devices(tpus)
    choose = search_policies if options.search else compile_one
    config, result = choose(steps.find_vocab(config), devices, tpus)
    if not result["fits"]:
        result["knobs"] = knobs(config, tpus)
    lengths = config.eval.streams, config.eval.tgt_len, config.eval.ext_len
    work = Work(evaluation_model(config.model, config.eval), *lengths, False)
    try:
        done = steps.compile_evaluation(config, devices)
        cost = estimate(tpus, fit_mesh(config, devices), done, work)
        result["evaluation"] = {"streams": config.eval.streams, **cost}
    except UserError as error:
        result["evaluation"] = {"error": str(error)}
    for line in table(result):
        say(line)
    if not tpus.chip.wraps:
        say("times are rough: without a GPU, XLA:GPU neither tunes nor fuses products")
    return result


def compile_one(
    config: Config, devices: list[Any], tpus: chips.Slices, first: int = 1
) -> tuple[Config, dict[str, Any]]:
    """Returns the config with the mesh and streams of `compile`, and its costs.

    first: the number of streams per chip that a search for the most tries first.
    """
    streams = config.compile.streams_per_chip
    if streams < 0:
        config, done = largest_batch(config, devices, tpus, first)
    else:
        size = streams * tpus.chips or config.train.batch_size
        config = replace(config, "train", batch_size=size)
        config, done = steps.compile_on_mesh(config, devices)
    return config, describe(config, devices, tpus, done)


def describe(
    config: Config, devices: list[Any], tpus: chips.Slices, done: Compiled
) -> dict[str, Any]:
    """Returns the slice, the mesh, and the costs of a compiled training step."""
    mesh, model, train = fit_mesh(config, devices), config.model, config.train
    lengths = train.batch_size, train.tgt_len, train.ext_len
    updates = train.updates_of_call(config.checkpoint.every_steps)
    repeats = train.batch_chunk, train.segments_per_update, updates
    return {
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
        **estimate(tpus, mesh, done, Work(model, *lengths, True, *repeats)),
    }


def search_policies(
    config: Config, devices: list[Any], tpus: chips.Slices
) -> tuple[Config, dict[str, Any]]:
    """Returns the fastest config that fits, and its costs, with those of each policy.

    For each remat policy: the least split mesh on which any streams fit, and the most
    streams that fit there, or compile.streams_per_chip. The fastest has the most tokens
    per second without overlap of products, memory traffic and exchanges.
    """
    streams, unit = config.compile.streams_per_chip or -1, config.train.batch_chunk
    config = replace(config, "compile", streams_per_chip=streams, mesh="auto")
    fitting: list[tuple[float, Config, dict[str, Any]]] = []
    for policy in ("none", "dots", "full"):
        tried = replace(config, "model", remat_policy=policy)
        try:
            tried, costs = compile_one(tried, devices, tpus)
            if not costs["fits"]:
                raise UserError(f"out of memory on {tpus.name}")
        except UserError as error:
            say(f"remat_policy = {policy}: {error}")
            continue
        rate = costs["tokens_per_second"]["no_overlap"]
        fitting.append((rate, tried, costs))
        say(f"remat_policy = {policy}: at least {rate:,.0f} tokens per second")
        if streams < 0 and costs["streams_per_chip"] > MOST_STREAMS - unit:
            break  # policies that keep less would fit no more streams
    if not fitting:
        raise UserError(
            f"no remat policy and mesh fit on {tpus.name}: use a larger slice, or "
            "--config.model.dtype=bfloat16"
        )
    _, config, result = max(fitting, key=lambda each: each[0])
    names = "remat_policy mesh streams_per_chip hbm_bytes tokens_per_second".split()
    candidates = [{name: costs[name] for name in names} for *_, costs in fitting]
    return config, {**result, "candidates": candidates}


def largest_batch(
    config: Config, devices: list[Any], tpus: chips.Slices, first: int = 1
) -> tuple[Config, Compiled]:
    """Returns the config with the most streams per chip that fit, and its step.

    The search begins with `first` streams per chip. compile.mesh = "auto" chooses the
    mesh for the fewest streams, so it begins with them. At most MOST_STREAMS are tried.
    """
    unit = config.train.batch_chunk
    first = max(first // unit, 1) if config.compile.mesh == "config" else 1
    fitting: dict[int, tuple[Config, Compiled]] = {}

    def fits(count: int) -> tuple[bool, int]:
        nonlocal config
        config = replace(config, "train", batch_size=count * unit * tpus.chips)
        config, done = steps.compile_on_mesh(config, devices)
        config = replace(config, "compile", mesh="config")  # the same from now on
        verb = "fit" if done.fits else "do not fit"
        room = f"{gib(done.bytes)} of {gib(tpus.chip.hbm)}"
        say(f"{count * unit} streams per chip {verb}: {room}")
        if done.fits:
            fitting[count] = config, done
        return done.fits, done.bytes

    most = max(MOST_STREAMS // unit, 1)
    count = search(fits, tpus.chip.hbm, most, first)
    if not count:
        raise UserError(
            f"not even {unit} streams per chip fit on {tpus.name} with mesh.model = "
            f"{max(config.mesh.model, 1)}: {knobs(config, tpus)}"
        )
    return fitting[count]


def search(
    fits: Callable[[int], tuple[bool, int]], capacity: float, most: int, first: int = 1
) -> int:
    """Returns the greatest count up to `most` that fits; 0 if none does.

    fits(count) is (True, bytes); `first` is tried first. Bytes grow about linearly with
    the count, so the next guess is where the line through the two newest trials meets
    the capacity. A program may be accepted although it states more bytes than the
    capacity, and the reverse: where the line contradicts the newest trial, steps of 1,
    2, 4, ... replace it.
    """
    low, high = 0, most + 1  # low fits, high does not or is not tried
    count, step, last, before = min(first, most), 1, 0, 0
    while high - low > 1:
        good, size = fits(count)
        low, high = (count, high) if good else (low, count)
        slope = max((size - before) / (count - last), 1)
        last, before = count, size
        guess = int(count + (capacity - size) / slope)
        if good == (guess > count):
            step = 1
        else:
            guess = count + step if good else count - step
            step *= 2
        count = min(max(guess, low + 1), high - 1)
    return low


def knobs(config: Config, tpus: chips.Slices) -> str:
    """Returns flags that lower the memory use."""
    model = config.model
    fused = "tpu" if tpus.chip.wraps else "chunked"
    einsum = model.kernel == "xla" and model.position == "transformer_xl"
    flags = {
        "model.remat_policy=full": model.remat_policy != "full",
        f"model.kernel={fused}": einsum,
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
        f"{result['slices']} x {result['topology']}: {result['chips']} chips, "
        f"{result['cores']} cores, {result['devices']} devices, mesh {result['mesh']}"
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
