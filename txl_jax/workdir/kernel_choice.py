"""Which attention kernels a run takes: measured once, and kept in its workdir."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.config import Config, with_values
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.evaluate.options import evaluation_model
from txl_jax.kernels.dispatch import KERNELS, find_candidates
from txl_jax.kernels.measure import Options, Workload, choose, describe, measure
from txl_jax.kernels.operands import PositionTerms
from txl_jax.model.positions import SCHEMES, position_terms
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, explain
from txl_jax.runtime.programs import record_loops
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
    works = {part: make_workloads(part, config, mesh) for part in PARTS}
    if all(x.keys() == {"xla"} for x in works.values()):
        return {}
    indices = np.zeros(len(PARTS), int)
    with distributed.together(*explain.storage_errors()):
        for i, part in enumerate(PARTS if distributed.is_first() else ()):
            name = read_or_measure(workdir / KERNELS_FILE, part, works[part], mesh)
            indices[i] = [*KERNELS].index(name)
    chosen = [[*KERNELS][i] for i in distributed.gather(indices)[0]]
    return dict(zip(PARTS, chosen, strict=True))


def read_or_measure(
    path: Path, part: str, works: dict[str, Workload], mesh: Mesh
) -> str:
    """Returns the fastest kernel, by the file or measured and added to it.

    Trials without a right kernel are not kept: they may be due to another program that
    uses the device.
    """
    if works.keys() == {"xla"}:
        return "xla"
    key = f"{part} on {mesh.size} x {jax.local_devices()[0].device_kind}"
    entry = f"{key}, jax {jax.__version__}: {works['xla']}"
    with refusing_damage(path):
        known = json.loads(path.read_text()) if path.exists() else {}
        trials = known.get(entry, {})
        if trials and choose(trials) in works:
            say(f"attention in {key}, by {path.name}: {describe(trials)}")
            return choose(trials)
    with waiting("measuring the attention kernels"):
        trials = measure(works, compiler_options(part, mesh))
    if any(isinstance(x, float) for x in trials.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known | {entry: trials}, indent=2) + "\n")
    say(f"attention in {key}: {describe(trials)}")
    return choose(trials)


def compiler_options(part: str, mesh: Mesh) -> Options:
    """Returns the options with which `train` compiles a part."""
    return record_loops([*mesh.devices.flat]) if part == "training" else None


def make_workloads(part: str, config: Config, mesh: Mesh) -> dict[str, Workload]:
    """Returns the workload of each kernel that applies.

    Only `xla` is split by the compiler where streams or heads do not divide over the
    mesh.
    """
    model, device, names = config.model, jax.local_devices()[0], ["xla"]
    B, has_dropout = count_streams(part, config), part == "training" and model.dropatt
    if not (B % shards(mesh, "B") or model.n_head % shards(mesh, "H")):
        names = find_candidates(
            device, model.d_head, model.compute_dtype, has_dropout > 0
        )
    return {
        name: make_workload(part, with_values(config, {"model.kernel": name}), mesh)
        for name in names
    }


def count_streams(part: str, config: Config) -> int:
    """Returns B of one call of the model, on all devices."""
    train = config.train
    is_training = part == "training"
    return train.batch_size // train.batch_chunk if is_training else config.eval.streams


def make_workload(part: str, config: Config, mesh: Mesh) -> Workload:
    """Returns the attention of a layer on one device of the mesh.

    In evaluation, its tokens depend on the kernel: see `evaluate.grouping`.
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
        (-(-B // shards(mesh, "B")), -(-H // shards(mesh, "H")), T, M, A, R),
        model.dtype,
        tuple(name for name, x in terms._asdict().items() if x is None),
        segment_len=L,
        dropout=dropout,
        layers=layers,
    )
