"""The mode `compile`: the memory of the training and evaluation steps on absent TPUs.

The steps are the programs that training and evaluation run, so a step that compiles
here also compiles there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

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


class Steps(NamedTuple):
    """The compiled steps of a config whose mesh fits the slices."""

    config: Config
    tpus: Slices
    devices: list[jax.Device]
    training: Compiled
    evaluation: Compiled | UserError


def compile_steps(config: Config) -> Steps:
    """Compiles both steps for compile.topology, and reports the memory of each."""
    options = config.compile
    tpus = lower.find_slices(options.topology, options.slices)
    devices = lower.find_devices(tpus)
    config = find_vocab(config)
    config, training = compile_on_mesh(config, devices)
    mesh = dict(fit_mesh(config, devices).shape)
    say(f"{tpus.slices} x {tpus.name}: {tpus.chips} chips, mesh {mesh}")
    report("training", tpus, training)
    if not training.fits:
        say(f"{'':>12}  {SAVINGS['train']}")
    evaluation: Compiled | UserError
    try:
        evaluation = compile_evaluation(config, devices)
        report("evaluation", tpus, evaluation)
    except UserError as error:
        evaluation = error
        say(f"{'evaluation':>12}  {error}")
    return Steps(config, tpus, devices, training, evaluation)


def describe(steps: Steps) -> Json:
    """Returns the slices, the step's settings and the costs of both steps."""
    config, tpus, devices, training, evaluation = steps
    model, train = config.model, config.train
    B, L, width = train.batch_size, train.tgt_len, train.ext_len + train.tgt_len
    flops = needed_flops(
        model, B, width, training=True, together=train.gradient_segments
    )
    flops /= B * L
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
        **costs(tpus, training, flops),
    }
    if not training.fits:
        result["knobs"] = SAVINGS["train"]
    if isinstance(evaluation, UserError):
        return result | {"evaluation": {"error": str(evaluation)}}
    model, each = evaluation_model(model, config.eval), config.eval
    B, L, width = each.streams, each.tgt_len, each.ext_len + each.tgt_len
    flops = needed_flops(model, B, width, training=False) / (B * L)
    return result | {"evaluation": {"streams": B, **costs(tpus, evaluation, flops)}}


def costs(tpus: Slices, done: Compiled, flops_per_token: float) -> Json:
    """Returns the memory, the compilation time and the FLOPs of a step."""
    result: Json = {
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(tpus.chip.hbm),
        "seconds_to_compile": round(done.seconds, 1),
        "flops_per_token": flops_per_token,
    }
    if not done.fits:
        result["exceeds_by_bytes"] = int(done.bytes - tpus.chip.hbm)
    return result


def report(name: str, tpus: Slices, done: Compiled) -> None:
    """Reports whether a step fits."""
    room = f"{gib(done.bytes)} of {gib(tpus.chip.hbm)}"
    over = f"out of memory: {room}, {gib(done.bytes - tpus.chip.hbm)} too much"
    say(f"{name:>12}  {f'fits: {room}' if done.fits else over}")


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
            f"{config.train.batch_size} and this model: change train.batch_size"
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
