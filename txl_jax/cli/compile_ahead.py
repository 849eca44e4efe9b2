"""The mode `compile`: the memory of the training and evaluation steps on absent TPUs.

The steps are the programs that training and evaluation run with the same kernel, so a
step that compiles here also compiles there. Kernels cannot be measured here: with
model.kernel = "auto", the steps have `xla`.
"""

import contextlib
import dataclasses

import jax

from txl_jax.aot import lower
from txl_jax.aot.lower import Compiled, Slices
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.evaluate.options import evaluation_model
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.model.flops import needed_flops
from txl_jax.report.log import say
from txl_jax.runtime.explain import SAVINGS
from txl_jax.runtime.storage import Json
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import check_streams
from txl_jax.train import step_segments
from txl_jax.update.state import abstract_segments, like_params
from txl_jax.update.step import make_updater
from txl_jax.workdir.resolve import find_vocab, fit_mesh


def compile_steps(config: Config) -> tuple[Json, dict[str, Compiled]]:
    """Compiles both steps for compile.topology; returns their costs, and the steps."""
    tpus = lower.find_slices(config.compile.topology, config.compile.slices)
    devices = lower.find_devices(tpus)
    config, step = compile_on_mesh(find_vocab(config), devices)
    model, train, mesh = config.model, config.train, fit_mesh(config, devices)
    say(f"{tpus.slices} x {tpus.name}: {tpus.chips} chips, mesh {dict(mesh.shape)}")
    B, L, width = train.batch_size, train.tgt_len, train.ext_len + train.tgt_len
    together = train.gradient_segments
    flops = needed_flops(model, B, width, training=True, together=together) / (B * L)
    result = {
        "topology": tpus.name,
        "slices": tpus.slices,
        "chips": tpus.chips,
        "cores": tpus.chips * tpus.chip.cores,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "kernel": "xla" if model.kernel == "auto" else model.kernel,
        "dtype": model.dtype,
        "remat_policy": model.remat_policy,
        "batch_size": B,
        "streams_per_chip": B / tpus.chips,
        "tokens": B * L * train.segments_per_update,
        **report_costs("training", step, tpus, flops),
    }
    steps = {"training": step}
    if not step.program:
        result["knobs"] = SAVINGS["train"]
        say(f"{'':>12}  {SAVINGS['train']}")
    try:
        step = steps["evaluation"] = compile_evaluation(config, devices)
    except UserError as error:
        say(f"{'evaluation':>12}  {error}")
        return result | {"evaluation": {"error": str(error)}}, steps
    model, each = evaluation_model(model, config.eval), config.eval
    B, L, width = each.streams, each.tgt_len, each.ext_len + each.tgt_len
    flops = needed_flops(model, B, width, training=False) / (B * L)
    costs = {"streams": B, **report_costs("evaluation", step, tpus, flops)}
    return result | {"evaluation": costs}, steps


def report_costs(name: str, step: Compiled, tpus: Slices, flops: float) -> Json:
    """Reports whether a step fits; returns its memory, compilation time and FLOPs.

    flops: per token.
    """
    fits, hbm = step.program is not None, tpus.chip.hbm
    room = f"{gib(step.bytes)} of {gib(hbm)}"
    over = f"out of memory: {room}, {gib(step.bytes - hbm)} too much"
    say(f"{name:>12}  {f'fits: {room}' if fits else over}")
    return {
        "fits": fits,
        "hbm_bytes": step.bytes,
        "hbm_capacity_bytes": int(hbm),
        "seconds_to_compile": round(step.seconds, 1),
        "flops_per_token": flops,
        **({} if fits else {"exceeds_by_bytes": int(step.bytes - hbm)}),
    }


def gib(size: float) -> str:
    """Formats bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def compile_on_mesh(
    config: Config, devices: list[jax.Device]
) -> tuple[Config, Compiled]:
    """Returns the config with its mesh, and its step.

    With compile.mesh = "auto", the model is split over the fewest devices that divide
    it and the streams, and the parameters over the fewest that fit.
    """
    if config.compile.mesh == "config":
        return config, compile_train_step(config, devices)
    for model in range(1, len(devices) + 1):
        if configs := with_meshes(config, devices, model):
            for tried in configs:
                step = compile_train_step(tried, devices)
                if step.program:
                    break
            return tried, step
    raise UserError(
        f"no mesh of {config.compile.topology} divides train.batch_size = "
        f"{config.train.batch_size} and this model: change train.batch_size"
    )


def with_meshes(config: Config, devices: list[jax.Device], model: int) -> list[Config]:
    """Returns the config with each mesh of mesh.model devices, by rising mesh.fsdp."""
    n, train = len(devices), config.train
    if n % model or train.batch_size // train.batch_chunk % (n // model):
        return []
    configs = []
    for fsdp in (2**k for k in range(n.bit_length()) if n // model % 2**k == 0):
        tried = dataclasses.replace(config, mesh=MeshConfig(-1, fsdp, model))
        with contextlib.suppress(UserError):
            fit_mesh(tried, devices)
            configs.append(tried)
    return configs


def compile_train_step(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the training step; raises UserError unless the streams divide."""
    mesh = fit_mesh(config, devices)
    updater = make_updater(config.model, config.train, config.optim, mesh)
    segments = step_segments(config, mesh)
    return lower.compile_step_for(mesh, updater.step, updater.like, segments)


def compile_evaluation(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the evaluation step; raises UserError unless the streams divide."""
    mesh, B = fit_mesh(config, devices), config.eval.streams
    check_streams(mesh, B, "eval.streams")
    params = like_params(config.model, mesh)
    reader = make_reader(config.model, config.eval, mesh)
    with jax.set_mesh(mesh):
        params = lower.abstract_result(reader.lay_out, params)
        memory = lower.abstract_result(reader.empty, params)
    segment = abstract_segments(mesh, 1, B, reader.tgt_len * reader.n_segments)
    return lower.compile_step_for(mesh, reader.step, memory, params, segment)
