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
from txl_jax.runtime.storage import refusing_damage, write_atomically
from txl_jax.sharding.rules import shards
from txl_jax.workdir.folder import KERNELS_FILE

PARTS = "training", "evaluation"  # of a run; each has its own kernel
Workloads = dict[str, Workload]  # by kernel


def choose_kernels(config: Config, workdir: Path, mesh: Mesh) -> dict[str, str]:
    """Returns the fastest kernel for each of PARTS; {} if there is no choice.

    Process 0 measures, and writes KERNELS_FILE, from which later starts on the same
    kind and number of devices take the same kernels.
    """
    if config.model.kernel != "auto":
        return {}
    parts = {part: make_workloads(part, config, mesh) for part in PARTS}
    if all(len(workloads) == 1 for workloads in parts.values()):
        return {}
    names = ["xla"] * len(PARTS)
    with distributed.together(*explain.storage_errors()):
        if distributed.is_first():
            names = read_or_measure(workdir / KERNELS_FILE, parts, mesh.size)
    indices = np.array([[*KERNELS].index(name) for name in names])
    names = [[*KERNELS][i] for i in distributed.gather(indices)[0]]
    return dict(zip(PARTS, names, strict=True))


def read_or_measure(
    path: Path, parts: dict[str, Workloads], n_devices: int
) -> list[str]:
    """Returns each part's kernel, from the file or measured and added to it."""
    names: list[str] = []
    device, is_new = f"{n_devices} x {jax.local_devices()[0].device_kind}", False
    with refusing_damage(path):
        rows = json.loads(path.read_text()) if path.exists() else {}
        known = {key: (row["kernel"], row["workloads"]) for key, row in rows.items()}
    for part, workloads in parts.items():
        if len(workloads) == 1:
            names += workloads
            continue
        key, as_json = f"{part} on {device}", json.loads(json.dumps(workloads))
        name, measured = known.get(key, ("", None))
        if measured == as_json and name in workloads:
            say(f"attention in {key}: {name}, by {path.name}")
        else:
            with waiting("measuring the attention kernels"):
                trials = measure(workloads)
            name = choose(trials)
            rows[key] = {"kernel": name, "trials": trials, "workloads": as_json}
            is_new = True
            say(f"attention in {key}: {describe(trials)}: {name}")
        names.append(name)
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(rows, indent=2) + "\n")
    return names


def make_workloads(part: str, config: Config, mesh: Mesh) -> Workloads:
    """Returns the workload of each kernel that applies, on one device of the mesh.

    Only `xla` is split by the compiler where streams do not divide over the mesh.
    """
    train, reading, model = config.train, config.eval, config.model
    B, L = train.batch_size // train.batch_chunk, config.train_width
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
    """Returns the attention of a layer, on one device, to T tokens in segments of L."""
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
