"""Compiles the steps of a config for a mesh, without running them.

These are the jitted functions that training and evaluation run, so a step that compiles
here also compiles there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from txl_jax.aot import lower
from txl_jax.aot.lower import Compiled
from txl_jax.checkpoint.save_restore import abstract
from txl_jax.config import Config
from txl_jax.data.options import SLACK
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.model.segment import Segment
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import check_streams, shards
from txl_jax.update.state import Program, TrainState
from txl_jax.update.step import make_program
from txl_jax.workdir.fit import fit_mesh
from txl_jax.workdir.load import like_params


def replace(config: Config, section: str, **fields: Any) -> Config:
    """Returns the config with fields of one section changed."""
    changed = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: changed})


def step_arguments(
    config: Config, mesh: Mesh, program: Program
) -> tuple[TrainState, Segment]:
    """Returns the shapes and shardings of the arguments of the training step."""
    train = config.train
    state = abstract(jax.eval_shape(program.init), program.shardings)
    L = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    S = train.segments_per_update
    S *= train.updates_of_call(config.checkpoint.every_steps)
    return state, lower.abstract_segments(mesh, S, train.batch_size, L)


def compile_train(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the training step; raises UserError like `check_mesh`."""
    mesh = check_mesh(config, devices)
    program = make_program(config.model, config.train, config.optim, mesh)
    state, segments = step_arguments(config, mesh, program)
    return lower.compile_step_for(mesh, program.step, state, segments)


def compile_evaluation(config: Config, devices: list[jax.Device]) -> Compiled:
    """Compiles the evaluation step; raises UserError for eval.streams."""
    mesh, B = fit_mesh(config, devices), config.eval.streams
    check_streams(mesh, B, "eval.streams")
    params = like_params(config.model, mesh)
    reader = make_reader(config.model, config.eval, mesh)
    with jax.set_mesh(mesh):
        params = lower.abstract_result(reader.unstack, params)
        memory = lower.abstract_result(reader.empty, params)
    segment = lower.abstract_segments(mesh, 1, B, reader.tgt_len * reader.segments)
    return lower.compile_step_for(mesh, reader, params, memory, segment)


def compile_on_mesh(
    config: Config, devices: list[jax.Device]
) -> tuple[Config, Compiled]:
    """Returns the config with the mesh of compile.mesh, and its compiled step.

    "auto" is the least split mesh that fits, or the last one tried if none does.
    """
    if config.compile.mesh == "config":
        return config, compile_train(config, devices)
    best = None
    for mesh in meshes(config, devices):
        if best and (best[1].fits or mesh.model > best[0].mesh.model):
            break
        tried = dataclasses.replace(config, mesh=mesh)
        best = tried, compile_train(tried, devices)
    if not best:
        check_mesh(replace(config, "mesh", data=-1, fsdp=1, model=1), devices)
        raise UserError(f"no mesh of {config.compile.topology} divides this model")
    return best


def meshes(config: Config, devices: list[jax.Device]) -> Iterator[MeshConfig]:
    """Yields the meshes over which streams and model divide, the least split first."""
    n, train = len(devices), config.train
    for model in (m for m in range(1, n + 1) if n % m == 0):
        streams, uneven = divmod(train.batch_size // train.batch_chunk, n // model)
        if uneven or not streams:
            continue
        for fsdp in (2**k for k in range(n.bit_length()) if n // model % 2**k == 0):
            mesh = MeshConfig(-1, fsdp, model)
            with contextlib.suppress(UserError):
                fit_mesh(dataclasses.replace(config, mesh=mesh), devices)
                yield mesh


def check_mesh(config: Config, devices: list[jax.Device]) -> Mesh:
    """Returns the config's mesh; raises UserError unless the streams divide over it."""
    train = config.train
    mesh = fit_mesh(config, devices)
    parts = shards(mesh, "B")
    if train.batch_size // train.batch_chunk % parts:
        streams = f"train.batch_size = {train.batch_size}"
        if train.batch_chunk > 1:
            streams += f" in {train.batch_chunk} chunks"
        fix = f"take --streams_per_chip={max(train.batch_size // len(devices), 1)}"
        if near := next(meshes(config, devices), None):
            fix = f"--config.mesh.model={near.model} works, and --mesh=auto finds it"
        raise UserError(
            f"{streams} is not divisible by the {parts} shards of mesh.data x "
            f"mesh.fsdp on {config.compile.topology}: {fix}"
        )
    return mesh
