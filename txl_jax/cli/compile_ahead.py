"""The mode `compile`: the memory and the exchanges of steps on absent TPUs or GPUs."""

import jax

from txl_jax.aot import chips
from txl_jax.aot.hlo import Program, collectives, largest_arrays
from txl_jax.aot.lower import Compiled
from txl_jax.cli import steps
from txl_jax.cli.steps import replace
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.evaluate.options import evaluation_model
from txl_jax.model.flops import needed_flops
from txl_jax.report.checksum import Json
from txl_jax.report.log import say
from txl_jax.workdir.fit import find_vocab, fit_mesh

MOST_STREAMS = 512  # per chip, where the search ends: a tiny model would never fill it


def compile_ahead(config: Config) -> Json:
    """Compiles the steps for compile.topology, and returns their costs."""
    options = config.compile
    tpus = chips.find(options.topology, options.slices)
    devices = chips.find_devices(tpus)
    config, done = compile_train(find_vocab(config), devices, tpus)
    model, train = config.model, config.train
    B, L, width = train.batch_size, train.tgt_len, train.ext_len + train.tgt_len
    flops = needed_flops(model, B, width, True) / (B * L)
    updates = train.updates_of_call(config.checkpoint.every_steps)
    result = {
        "topology": tpus.name,
        "slices": tpus.slices,
        "chips": tpus.chips,
        "cores": tpus.chips * tpus.chip.cores,
        "devices": len(devices),
        "mesh": dict(fit_mesh(config, devices).shape),
        "kernel": model.kernel,
        "dtype": model.dtype,
        "remat_policy": model.remat_policy,
        "batch_size": B,
        "streams_per_chip": B / tpus.chips,
        **costs(tpus, done, flops, updates),
    }
    if not done.fits:
        result["knobs"] = knobs(config, tpus)
    try:
        done = steps.compile_evaluation(config, devices)
        model, each = evaluation_model(model, config.eval), config.eval
        B, L, width = each.streams, each.tgt_len, each.ext_len + each.tgt_len
        flops = needed_flops(model, B, width, False) / (B * L)
        result["evaluation"] = {"streams": B, **costs(tpus, done, flops)}
    except UserError as error:
        result["evaluation"] = {"error": str(error)}
    for line in table(result):
        say(line)
    return result


def costs(
    tpus: chips.Slices, done: Compiled, flops_per_token: float, updates: int = 1
) -> Json:
    """Returns the memory of a step on a device, and its exchanges in an update."""
    result: Json = {
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(tpus.chip.hbm),
        "seconds_to_compile": round(done.seconds, 1),
        "flops_per_token": flops_per_token,
    }
    if not done.fits:
        result["exceeds_by_bytes"] = int(done.bytes - tpus.chip.hbm)
    if done.text:
        program = Program(done.text)
        totals: dict[str, dict[str, int]] = {}
        for kind, size, times in collectives(program):
            total = totals.setdefault(kind, {"count": 0, "bytes": 0})
            total["count"] += times
            total["bytes"] += times * size
        result["collectives"] = {
            kind: {name: round(amount / updates) for name, amount in total.items()}
            for kind, total in totals.items()
        }
        result["largest_arrays"] = [x._asdict() for x in largest_arrays(program)]
    return result


def compile_train(
    config: Config, devices: list[jax.Device], tpus: chips.Slices
) -> tuple[Config, Compiled]:
    """Returns the config with the mesh and the streams of `compile`, and its step."""
    streams = config.compile.streams_per_chip
    if streams < 0:
        return largest_batch(config, devices, tpus)
    size = streams * tpus.chips or config.train.batch_size
    return steps.compile_on_mesh(replace(config, "train", batch_size=size), devices)


def largest_batch(
    config: Config, devices: list[jax.Device], tpus: chips.Slices
) -> tuple[Config, Compiled]:
    """Returns the config with the most streams per chip that fit, and its step.

    They are found by bisection, up to MOST_STREAMS. The mesh of compile.mesh = "auto"
    is that of the fewest streams.
    """
    unit = config.train.batch_chunk
    fitting = None
    low, count, high = 0, 1, max(MOST_STREAMS // unit, 1) + 1
    while high - low > 1:
        config = replace(config, "train", batch_size=count * unit * tpus.chips)
        config, done = steps.compile_on_mesh(config, devices)
        config = replace(config, "compile", mesh="config")  # the same from now on
        verb = "fit" if done.fits else "do not fit"
        room = f"{gib(done.bytes)} of {gib(tpus.chip.hbm)}"
        say(f"{count * unit} streams per chip {verb}: {room}")
        if done.fits:
            low, fitting = count, (config, done)
        else:
            high = count
        count = (low + high) // 2
    if not fitting:
        raise UserError(
            f"not even {unit} streams per chip fit on {tpus.name} with mesh.model = "
            f"{max(config.mesh.model, 1)}: {knobs(config, tpus)}"
        )
    return fitting


def knobs(config: Config, tpus: chips.Slices) -> str:
    """Returns flags that lower the memory use."""
    model = config.model
    fused = "tpu" if tpus.are_tpus else "chunked"
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


def table(result: Json) -> list[str]:
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
        if step["fits"]:
            lines.append(f"{name:>12}  fits: {room}")
        else:
            over = gib(step["exceeds_by_bytes"])
            lines.append(f"{name:>12}  out of memory: {room}, {over} too much")
        for kind, each in step.get("collectives", {}).items():
            total = f"{each['count']} of {each['bytes'] / 1e6:,.1f} MB in total"
            lines.append(f"{kind:>28}  {total}")
        for array in step.get("largest_arrays", ()):
            *_, origin = array["op_name"].rsplit("closed_call/", 1)
            size = f"{array['bytes'] / 2**20:,.1f} MiB"
            lines.append(f"{size:>28}  {array['shape']} {origin}")
    if "knobs" in result:
        lines.append(f"{'':>12}  {result['knobs']}")
    return lines
