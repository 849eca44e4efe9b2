"""The mode `compile`: the memory and the exchanges of steps on absent TPUs.

The steps are the jitted functions that training and evaluation run, so a step that
compiles here also compiles there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from txl_jax.aot import chips, lower
from txl_jax.aot.chips import Slices
from txl_jax.aot.hlo import HloProgram, collectives, largest_arrays
from txl_jax.aot.lower import Compiled
from txl_jax.cli.plan import step_arguments
from txl_jax.config import Config, with_fields
from txl_jax.errors import SAVINGS, UserError
from txl_jax.evaluate.options import evaluation_model
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.model.flops import needed_flops
from txl_jax.report.checksum import Json
from txl_jax.report.log import say
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import check_streams
from txl_jax.update.step import make_program
from txl_jax.workdir.fit import find_vocab, fit_mesh
from txl_jax.workdir.load import like_params


def compile_ahead(config: Config) -> Json:
    """Compiles the steps for compile.topology, and returns their costs."""
    options = config.compile
    tpus = chips.find(options.topology, options.slices)
    devices = chips.find_devices(tpus)
    config = find_vocab(config)
    if options.streams_per_chip:
        size = options.streams_per_chip * tpus.chips
        config = with_fields(config, "train", batch_size=size)
    config, done = compile_on_mesh(config, devices)
    model, train = config.model, config.train
    B, L, width = train.batch_size, train.tgt_len, train.ext_len + train.tgt_len
    flops = needed_flops(model, B, width, True, train.gradient_segments) / (B * L)
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
        "tokens": B * L * train.segments_per_update,
        **costs(tpus, done, flops, updates),
    }
    say(f"{tpus.slices} x {tpus.name}: {tpus.chips} chips, mesh {result['mesh']}")
    report("training", result)
    if not done.fits:
        result["knobs"] = SAVINGS["train"]
        say(f"{'':>12}  {result['knobs']}")
    try:
        done = compile_evaluation(config, devices)
        model, each = evaluation_model(model, config.eval), config.eval
        B, L, width = each.streams, each.tgt_len, each.ext_len + each.tgt_len
        flops = needed_flops(model, B, width, False) / (B * L)
        result["evaluation"] = {"streams": B, **costs(tpus, done, flops)}
        report("evaluation", result["evaluation"])
    except UserError as error:
        result["evaluation"] = {"error": str(error)}
        say(f"{'evaluation':>12}  {error}")
    return result


def costs(
    tpus: Slices, done: Compiled, flops_per_token: float, updates: int = 1
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
        program = HloProgram(done.text)
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


def report(name: str, step: Json) -> None:
    """Reports the costs of a step."""
    room = f"{gib(step['hbm_bytes'])} of {gib(step['hbm_capacity_bytes'])}"
    over = gib(step.get("exceeds_by_bytes", 0))
    fits = (
        f"fits: {room}" if step["fits"] else f"out of memory: {room}, {over} too much"
    )
    say(f"{name:>12}  {fits}")
    for kind, each in step.get("collectives", {}).items():
        say(f"{kind:>28}  {each['count']} of {each['bytes'] / 1e6:,.1f} MB in total")
    for array in step.get("largest_arrays", ()):
        *_, origin = array["op_name"].rsplit("closed_call/", 1)
        say(f"{array['bytes'] / 2**20:>24,.1f} MiB  {array['shape']} {origin}")


def gib(size: float) -> str:
    """Formats bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def compile_on_mesh(
    config: Config, devices: list[jax.Device]
) -> tuple[Config, Compiled]:
    """Returns the config with the least split mesh that fits, and its step."""
    if config.compile.mesh == "config":
        return config, compile_train_step(config, devices)
    best = None
    for tried in meshes(config, devices):
        if best and (best[1].fits or tried.mesh.model > best[0].mesh.model):
            break
        best = tried, compile_train_step(tried, devices)
    if not best:
        raise UserError(
            f"no mesh of {config.compile.topology} divides train.batch_size = "
            f"{config.train.batch_size} and this model: change --streams_per_chip"
        )
    return best


def meshes(config: Config, devices: list[jax.Device]) -> Iterator[Config]:
    """Yields the config with each mesh that divides it, the least split first."""
    n, train = len(devices), config.train
    for model in (m for m in range(1, n + 1) if n % m == 0):
        streams, uneven = divmod(train.batch_size // train.batch_chunk, n // model)
        for fsdp in (2**k for k in range(n.bit_length()) if n // model % 2**k == 0):
            tried = dataclasses.replace(config, mesh=MeshConfig(-1, fsdp, model))
            with contextlib.suppress(UserError):
                fit_mesh(tried, devices)
                if streams and not uneven:
                    yield tried


def compile_train_step(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the training step; raises UserError unless the streams divide."""
    mesh = fit_mesh(config, devices)
    program = make_program(config.model, config.train, config.optim, mesh)
    state, segments = step_arguments(config, mesh, program)
    return lower.compile_step_for(mesh, program.step, state, segments)


def compile_evaluation(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the evaluation step; raises UserError unless the streams divide."""
    mesh, B = fit_mesh(config, devices), config.eval.streams
    check_streams(mesh, B, "eval.streams")
    params = like_params(config.model, mesh)
    reader = make_reader(config.model, config.eval, mesh)
    with jax.set_mesh(mesh):
        params = lower.abstract_result(reader.unstack, params)
        memory = lower.abstract_result(reader.empty, params)
    segment = lower.abstract_segments(mesh, 1, B, reader.tgt_len * reader.segments)
    return lower.compile_step_for(mesh, reader, params, memory, segment)
