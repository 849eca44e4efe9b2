"""Which attention kernels a run takes: measured once, and kept in its workdir."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import Config
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.evaluate.options import evaluation_model
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.measure import Workload, choose, describe, find_candidates, measure
from txl_jax.kernels.operands import PositionTerms
from txl_jax.kernels.sharded import divides
from txl_jax.model.config import ModelConfig
from txl_jax.model.positions import SCHEMES, position_terms
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, refusing_damage
from txl_jax.sharding.rules import shards
from txl_jax.workdir.folder import KERNELS_FILE

PARTS = "training", "evaluation"


def choose_kernels(
    config: Config, workdir: Path, mesh: Mesh
) -> tuple[list[ModelConfig], Json]:
    """Returns (the models of training and of evaluation, the rows of KERNELS_FILE).

    Their kernels are those of `model.kernel` or, with `auto`, of an earlier start on
    the same kind and number of devices; otherwise process 0 measures them.
    """
    model, rows = config.model, Json()
    names = [model.kernel] * len(PARTS)
    if model.kernel == "auto":
        is_even = all(
            divides(mesh.abstract_mesh, B, model.n_head)
            for B in (config.train.batch_size, config.eval.streams)
        )
        names = ["xla"] * len(PARTS)  # only `xla` is split by the compiler
        if is_even:
            if distributed.is_first():
                path = workdir / KERNELS_FILE
                with refusing_damage(path):
                    rows = json.loads(path.read_text()) if path.exists() else {}
                names = [find_kernel(part, config, mesh, rows) for part in PARTS]
            indices = np.array([[*KERNELS].index(name) for name in names])
            names = [[*KERNELS][i] for i in distributed.gather(indices)[0]]
    return [dataclasses.replace(model, kernel=name) for name in names], rows


def find_kernel(part: str, config: Config, mesh: Mesh, rows: Json) -> str:
    """Returns the kernel of a part of the run, measured if `rows` lacks it."""
    workloads = make_workloads(part, config, mesh)
    if [*workloads] == ["xla"]:
        return "xla"
    key = f"{part} on {mesh.size} x {jax.local_devices()[0].device_kind}"
    work = json.loads(json.dumps(workloads))
    if key not in rows or rows[key]["workloads"] != work:
        with waiting("measuring the attention kernels"):
            trials = measure(workloads)
        found = {name: fault or ms for name, (ms, fault) in trials.items()}
        rows[key] = {"kernel": choose(trials), "trials": found, "workloads": work}
        say(f"attention in {key}: {describe(trials)}: {rows[key]['kernel']}")
    kernel: str = rows[key]["kernel"]
    return kernel


def make_workloads(part: str, config: Config, mesh: Mesh) -> dict[str, Workload]:
    """Returns the workload of each kernel that applies, on one device of the mesh."""
    train, model, device = config.train, config.model, jax.local_devices()[0]
    B = train.batch_size // train.batch_chunk
    L = train.gradient_segments * (train.ext_len + train.tgt_len)
    if part != "training":
        model = evaluation_model(model, config.eval)
        B, L = config.eval.streams, config.eval.ext_len + config.eval.tgt_len

    def workload(kernel: str) -> Workload:
        W, one = L, dataclasses.replace(model, kernel=kernel)
        if part != "training":
            S = count_segments(one, config.eval.segments_per_step, B, L, mesh)
            W = window_tokens(one, S, B, L, mesh)
        sizes = B // shards(mesh, "B"), model.n_head // shards(mesh, "H"), W
        return make_workload(one, *sizes, training=part == "training")

    names = find_candidates(device, workload("xla"))
    return {name: workload(name) for name in names}


def make_workload(
    config: ModelConfig, B: int, H: int, L: int, training: bool
) -> Workload:
    """Returns the attention of H heads of one layer, to measure kernels on."""
    M, scheme, shape = config.mem_len, SCHEMES[config.position], (H, config.d_head)
    biases = {name: jnp.zeros(shape) for name in scheme.biases}
    R_RD = scheme.encoding(config, M + L) if scheme.encoding else None
    terms: PositionTerms = jax.eval_shape(
        lambda: position_terms(
            dataclasses.replace(config, n_head=H),
            lambda name, letters, shape: jnp.zeros(shape),
            R_RD,
            biases,
            M + L,
        )
    )
    R = M + L
    if terms.r_RHA is not None:
        R = len(terms.r_RHA)
    elif terms.bias_HR is not None:
        R = terms.bias_HR.shape[1]
    is_kept = training and config.remat_policy == "none"
    return Workload(
        (B, H, L, M, config.d_head, R),
        config.dtype,
        tuple(name for name, x in terms._asdict().items() if x is None),
        config.dropatt if training else 0.0,
        backward=training,
        layers=config.n_layer if is_kept else 1,
    )
