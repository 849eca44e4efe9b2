"""Which attention kernels a run takes: measured once, and kept in its workdir."""

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
from txl_jax.model.positions import SCHEMES, position_terms
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, explain
from txl_jax.runtime.storage import refusing_damage, write_atomically
from txl_jax.sharding.rules import shards
from txl_jax.workdir.folder import KERNELS_FILE

PARTS = "training", "evaluation"  # of a run; each has its own kernel


def choose_kernels(config: Config, workdir: Path, mesh: Mesh) -> dict[str, str]:
    """Returns the fastest kernel for each of PARTS; {} if there is no choice.

    Process 0 measures, and writes KERNELS_FILE, from which later starts on the same
    kind and number of devices take the same kernels.
    """
    if config.model.kernel != "auto":
        return {}
    works = {part: make_workload(part, config, mesh) for part in PARTS}
    names = {part: find_kernels(part, works[part], config, mesh) for part in PARTS}
    if all(x == ["xla"] for x in names.values()):
        return {}
    path, device = workdir / KERNELS_FILE, jax.local_devices()[0].device_kind
    indices = np.zeros(len(PARTS), int)
    with distributed.together(*explain.storage_errors()):
        for i, part in enumerate(PARTS if distributed.is_first() else ()):
            key = f"{part} on {mesh.size} x {device}"
            name = read_or_measure(path, key, names[part], works[part])
            indices[i] = [*KERNELS].index(name)
    chosen = [[*KERNELS][i] for i in distributed.gather(indices)[0]]
    return dict(zip(PARTS, chosen, strict=True))


def read_or_measure(path: Path, key: str, names: list[str], work: Workload) -> str:
    """Returns the fastest kernel, by the file or measured and added to it."""
    if names == ["xla"]:
        return "xla"
    entry = f"{key}, jax {jax.__version__}: {work}"
    with refusing_damage(path):
        known = json.loads(path.read_text()) if path.exists() else {}
        trials = known.get(entry)
        name = choose(trials) if trials else ""
    if name in names:
        say(f"attention in {key}: {name}, by {path.name}")
        return name
    with waiting("measuring the attention kernels"):
        trials = measure(names, work)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known | {entry: trials}, indent=2) + "\n")
    say(f"attention in {key}: {describe(trials)}")
    return choose(trials)


def find_kernels(part: str, work: Workload, config: Config, mesh: Mesh) -> list[str]:
    """Returns the kernels that apply.

    Only `xla` is split by the compiler where streams do not divide over the mesh.
    """
    if count_streams(part, config) % shards(mesh, "B"):
        return ["xla"]
    device, model = jax.local_devices()[0], config.model
    return find_candidates(device, model.d_head, model.compute_dtype, work.dropout > 0)


def count_streams(part: str, config: Config) -> int:
    """Returns B of one call of the model, on all devices."""
    train = config.train
    is_training = part == "training"
    return train.batch_size // train.batch_chunk if is_training else config.eval.streams


def make_workload(part: str, config: Config, mesh: Mesh) -> Workload:
    """Returns the attention of a layer on one device of the mesh.

    In evaluation, all kernels get the windows of `xla`.
    """
    reading, model, B = config.eval, config.model, count_streams(part, config)
    if part == "training":
        L, dropout = config.train_width, model.dropatt
        T = config.train.gradient_segments * L
        layers = model.n_layer if model.remat_policy == "none" else 1
    else:
        model, dropout, layers = evaluation_model(model, reading), 0.0, 0
        L = reading.ext_len + reading.tgt_len
        S = count_segments(model, reading.segments_per_step, B, L, mesh)
        T = window_tokens(model, S, B, L, mesh)
    scheme, H, A, M = SCHEMES[model.position], model.n_head, model.d_head, model.mem_len
    biases = {name: jnp.zeros((H, A)) for name in scheme.biases}
    R_RD = scheme.encoding(model, M + T) if scheme.encoding else None

    def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape)

    terms: PositionTerms = jax.eval_shape(
        lambda: position_terms(model, make, R_RD, biases, M + T)
    )
    R = M + T
    if terms.r_RHA is not None:
        R = len(terms.r_RHA)
    elif terms.bias_HR is not None:
        R = terms.bias_HR.shape[1]
    return Workload(
        (-(-B // shards(mesh, "B")), H // shards(mesh, "H"), T, M, A, R),
        model.dtype,
        tuple(name for name, x in terms._asdict().items() if x is None),
        segment_len=L,
        dropout=dropout,
        layers=layers,
    )
