"""Which attention kernels a run takes: measured once, and kept in its workdir."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.config import Config
from txl_jax.data.options import SLACK
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.evaluate.options import evaluation_model
from txl_jax.kernels.dispatch import KERNELS, find_candidates
from txl_jax.kernels.measure import Workload, choose, describe, measure
from txl_jax.kernels.operands import PositionTerms
from txl_jax.model.config import ModelConfig
from txl_jax.model.interval import count_keys
from txl_jax.model.positions import SCHEMES, position_terms
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, explain
from txl_jax.runtime.storage import Json, refusing_damage
from txl_jax.sharding.rules import shards
from txl_jax.update.options import TrainConfig
from txl_jax.workdir.folder import KERNELS_FILE

PARTS = "training", "evaluation"


def choose_kernels(
    config: Config, workdir: Path, mesh: Mesh
) -> tuple[list[ModelConfig], Json]:
    """Returns (the models of training and of evaluation, new rows of KERNELS_FILE).

    Their kernels are those of `model.kernel` or, with `auto`, of an earlier start on
    the same kind and number of devices; otherwise process 0 measures them.
    """
    model, rows = config.model, Json()
    names = [model.kernel] * len(PARTS)
    if model.kernel == "auto":
        names = ["xla"] * len(PARTS)
        with distributed.together(*explain.storage_errors()):
            if distributed.is_first():
                old = read_rows(workdir)
                rows |= old
                names = [find_kernel(part, config, mesh, rows) for part in PARTS]
                rows = {} if rows == old else rows
        indices = np.array([[*KERNELS].index(name) for name in names])
        names = [[*KERNELS][i] for i in distributed.gather(indices)[0]]
    return [dataclasses.replace(model, kernel=name) for name in names], rows


def read_rows(workdir: Path) -> Json:
    """Returns the rows of earlier starts; raises UserError if they are damaged."""
    path = workdir / KERNELS_FILE
    with refusing_damage(path):
        rows = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(rows, dict):
            raise ValueError("it is not a JSON object")
        return rows


def find_kernel(part: str, config: Config, mesh: Mesh, rows: Json) -> str:
    """Returns the kernel of a part of the run, measured if `rows` lacks it."""
    workloads = make_workloads(part, config, mesh)
    if [*workloads] == ["xla"]:
        return "xla"
    key = f"{part} on {mesh.size} x {jax.local_devices()[0].device_kind}"
    work = json.loads(json.dumps(workloads))
    old = rows.get(key)
    if isinstance(old, dict) and old.get("workloads") == work:
        if old.get("kernel") in workloads:
            say(f"attention in {key}: {old['kernel']}, by {KERNELS_FILE}")
            kept: str = old["kernel"]
            return kept
    with waiting("measuring the attention kernels"):
        trials = measure(workloads)
    name = choose(trials)
    rows[key] = {"kernel": name, "trials": trials, "workloads": work}
    say(f"attention in {key}: {describe(trials)}: {name}")
    return name


def padded_len(train: TrainConfig) -> int:
    """Returns the tokens of a training segment's arrays."""
    return train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)


def make_workloads(part: str, config: Config, mesh: Mesh) -> dict[str, Workload]:
    """Returns the workload of each kernel that applies, on one device of the mesh.

    Only `xla` is split by the compiler where streams do not divide over the mesh.
    """
    train, reading, model = config.train, config.eval, config.model
    B, L = train.batch_size // train.batch_chunk, padded_len(train)
    if part == "evaluation":
        B, L = reading.streams, reading.ext_len + reading.tgt_len
        model = evaluation_model(model, reading)

    def workload(kernel: str) -> Workload:
        one = dataclasses.replace(model, kernel=kernel)
        T = train.gradient_segments * L
        if part == "evaluation":
            S = count_segments(one, reading.segments_per_step, B, L, mesh)
            T = window_tokens(one, S, B, L, mesh)
        return make_workload(one, mesh, B, T, L, training=part == "training")

    names = ["xla"]
    if B % shards(mesh, "B") == 0:
        device, has_dropout = jax.local_devices()[0], workload("xla").dropout > 0
        names = find_candidates(device, model.d_head, model.compute_dtype, has_dropout)
    return {name: workload(name) for name in names}


def make_workload(
    config: ModelConfig, mesh: Mesh, B: int, T: int, L: int, training: bool
) -> Workload:
    """Returns the attention of one layer and device to T tokens, segments of L."""
    A, M, scheme = config.d_head, config.mem_len, SCHEMES[config.position]
    biases = {name: jnp.zeros((config.n_head, A)) for name in scheme.biases}
    R_RD = scheme.encoding(config, M + T) if scheme.encoding else None

    def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape)

    terms: PositionTerms = jax.eval_shape(
        lambda: position_terms(config, make, R_RD, biases, M + T)
    )
    R = M + T
    if terms.r_RHA is not None:
        R = len(terms.r_RHA)
    elif terms.bias_HR is not None:
        R = terms.bias_HR.shape[1]
    B, H = -(-B // shards(mesh, "B")), config.n_head // shards(mesh, "H")
    is_kept = training and config.remat_policy == "none"
    return Workload(
        (B, H, T, M, A, R),
        config.dtype,
        tuple(name for name, x in terms._asdict().items() if x is None),
        segment_len=L,
        keys_per_query=count_keys(config, M),
        dropout=config.dropatt if training else 0.0,
        backward=training,
        layers=config.n_layer if is_kept else 1,
    )
