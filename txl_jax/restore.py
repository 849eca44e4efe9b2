"""From a workdir to a model that can be used: `load(workdir)`."""

import dataclasses
import os
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
from jax.sharding import Mesh

from txl_jax import checkpoint, config, record, sharding
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.record import Damaged
from txl_jax.report.wait import waiting
from txl_jax.report.writer import last_step, say
from txl_jax.state import abstract_params
from txl_jax.workdir import (
    CONFIG,
    METRICS,
    VOCAB,
    find,
    fit_mesh,
    fit_vocab,
    refuse_conflicts,
)

MEND_VOCAB = "bring it back; if it was trained here, its command makes it anew"


class Loaded(NamedTuple):
    """A trained model: `model.apply({"params": params}, tokens_BL, memory)`."""

    model: TransformerXL
    params: Any
    vocab: Vocab
    config: Config
    step: int
    mesh: Mesh


def load(workdir: str | Path, given: Config | None = None) -> Loaded:
    """Returns the model that a workdir's run trained, averaged if the run averages.

    `given` replaces the workdir's own config, for another evaluation or mesh, and its
    eval.checkpoint says which checkpoint; the model must be the same. Raises UserError
    when the workdir holds no run or no such checkpoint.
    """
    workdir = find(os.fspath(workdir))
    saved = config.parse(config.load_json(workdir / CONFIG))
    given = given or saved
    refuse_conflicts(workdir, saved, dataclasses.replace(saved, model=given.model))
    vocab = vocabulary.load(workdir / VOCAB, MEND_VOCAB)
    given = fit_vocab(given, len(vocab))
    mesh = fit_mesh(given)
    like = like_params(given.model, mesh)
    averages = saved.optim.average != "none"
    which = given.eval.checkpoint
    opened = checkpoint.open_checkpoints(workdir, given.checkpoint, read_only=True)
    with waiting(f"reading a checkpoint of {workdir}"), closing(opened) as manager:
        try:
            params, step = checkpoint.restore_params(
                manager, which, like, averages=averages
            )
        except Damaged as error:
            others = ", ".join(map(str, sorted(manager.all_steps())))
            raise UserError(
                f"{error}: give eval.checkpoint another step of {others}"
            ) from error
    return Loaded(TransformerXL(given.model), params, vocab, given, step, mesh)


def like_params(model: ModelConfig, mesh: Mesh) -> Any:
    """Returns the parameters' shapes and dtypes, and where on the mesh they live."""
    shapes = abstract_params(model)
    places = sharding.shardings(mesh, nn.get_partition_spec(shapes))
    return checkpoint.abstract(nn.unbox(shapes), places)


def load_initial(given: Config, workdir: Path, vocab: Vocab) -> Any:
    """Returns the parameters that a run begins with, or None for random ones.

    They are those of the best checkpoint of train.init_from, a workdir, averaged if
    that run averages. None also where `workdir` has a checkpoint to go on from: then
    train.init_from is not read. given.model.vocab_size is set. Raises UserError when
    they are missing or damaged, or belong to another vocabulary or another model, and
    as `has_checkpoint` does.
    """
    if has_checkpoint(workdir, given) or not given.train.init_from:
        return None
    source = given.train.init_from
    try:
        return _load_fitting(find(source), given, vocab)
    except UserError as error:
        raise UserError(f"train.init_from = {source!r}: {error}") from error


def has_checkpoint(workdir: Path, given: Config) -> bool:
    """Returns whether there is a checkpoint to go on from; writes nothing.

    Raises UserError where it is lost: where all are damaged or of another model, and
    where none is there though the run went beyond where its first ones were saved. One
    that a kill ended before its first checkpoint begins again, and says so.
    """
    folder = workdir / "checkpoints"
    opened = checkpoint.open_checkpoints(workdir, given.checkpoint, read_only=True)
    with closing(opened) as manager:
        steps = manager.all_steps()
        records = [manager.records[step] for step in steps if step in manager.records]
        if records:
            like = {"params": like_params(given.model, fit_mesh(given))}
            record.refuse_misfits(max(records, key=lambda each: each.step), like)
            return True
        if steps:
            try:
                manager.read_record(max(steps))
            except UserError as error:
                raise UserError(
                    f"no checkpoint in {folder} can be restored ({error}): bring one "
                    "back, or give another --workdir to start anew"
                ) from error
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder: move it away")
    made = last_step(workdir / METRICS)
    late = 2 * max(given.checkpoint.every_steps, given.train.eval_every)
    if made and (made > late or not folder.exists()):
        raise UserError(
            f"{workdir} was trained to update {made}, as {METRICS} shows, but has no "
            "checkpoint: bring its folder checkpoints back, or move that file away to "
            "train it again from the start"
        )
    if made:
        say(f"NO CHECKPOINT in {folder}: updates 1 to {made} are made again")
    return False


# Fields in which a run may differ from the one that its parameters come from: they do
# not change what a parameter means. Of the others even those that shapes do not show
# are compared, such as heads of another size or the epsilon of a norm.
FREE = (
    *("mem_len", "initial_memory", "clamp_len", "same_length"),
    *("dropout", "dropatt", "variational", "word_dropout"),
    *("init_std", "init_range", "proj_init_std", "norm_init_std", "cluster_init_std"),
    *("dtype", "mem_dtype", "kernel", "remat", "unroll"),
)


def _load_fitting(source: Path, given: Config, vocab: Vocab) -> Any:
    if not os.path.isfile(source / CONFIG):  # also of a path that no system takes
        raise UserError(f"it holds no run (no {CONFIG}): give the workdir of one")
    saved = config.parse(config.load_json(source / CONFIG))
    if vocabulary.load(source / VOCAB, MEND_VOCAB).to_json() != vocab.to_json():
        raise UserError(
            "its vocabulary is not this run's: take it with "
            f"data.vocab_path={str(source / VOCAB)!r}"
        )
    saved = fit_vocab(saved, len(vocab))
    averages = saved.optim.average != "none"
    like = like_params(given.model, fit_mesh(given))
    opened = checkpoint.open_checkpoints(source, given.checkpoint, read_only=True)
    with closing(opened) as manager:
        (step,) = checkpoint.find_steps(manager, "best")
        found = checkpoint.read_shapes(manager, step, averages=averages)
        refuse_misfits(saved.model, given.model, found, checkpoint.shapes(like))
        which = str(step)
        return checkpoint.restore_params(manager, which, like, averages=averages)[0]


def refuse_misfits(
    there: ModelConfig,
    here: ModelConfig,
    found: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
) -> None:
    """Refuses parameters of other shapes, or of a model that they mean otherwise in."""
    misfits = []
    for field in dataclasses.fields(ModelConfig):
        old, new = getattr(there, field.name), getattr(here, field.name)
        if old != new and field.name not in FREE:
            misfits.append(f"model.{field.name} is {old!r} there, {new!r} here")
    for name in sorted({*found, *expected}):
        old, new = found.get(name, "missing"), expected.get(name, "missing")
        if old != new:
            misfits.append(f"parameter {name} is {old} there, {new} here")
            break  # the others seldom say more
    if misfits:
        raise UserError(
            f"its model is another ({'; '.join(misfits)}): give these fields as its "
            f"{CONFIG} has them"
        )
