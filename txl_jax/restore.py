"""From a workdir to a model that can be used: `load(workdir)`."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
from jax.sharding import Mesh

from txl_jax import checkpoint, config, sharding
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.model.txl import TransformerXL
from txl_jax.state import abstract_params
from txl_jax.workdir import CONFIG, VOCAB, fit_mesh, fit_vocab, refuse_conflicts


class Loaded(NamedTuple):
    """A trained model: `model.apply({"params": params}, tokens_BL, memory)`."""

    model: TransformerXL
    params: Any
    vocab: vocabulary.Vocab
    config: Config
    step: int
    mesh: Mesh


def load(workdir: str | Path, given: Config | None = None) -> Loaded:
    """Returns the model that a workdir's run trained.

    `given` replaces the workdir's own config, for another evaluation or mesh, and its
    eval.checkpoint says which checkpoint; the model must be the same. Raises UserError
    when the workdir holds no run or no such checkpoint.
    """
    workdir = Path(workdir)
    saved = config.parse(config.load_json(workdir / CONFIG))
    given = given or saved
    refuse_conflicts(workdir, saved, dataclasses.replace(saved, model=given.model))
    vocab = vocabulary.load(workdir / VOCAB)
    given = fit_vocab(given, len(vocab))
    mesh = fit_mesh(given)
    shapes = abstract_params(given.model)
    places = sharding.shardings(mesh, nn.get_partition_spec(shapes))
    like = checkpoint.abstract(nn.unbox(shapes), places)
    opened = checkpoint.open_checkpoints(workdir, given.checkpoint, read_only=True)
    with closing(opened) as manager:
        which = given.eval.checkpoint
        params, step = checkpoint.restore_params(manager, which, like)
    return Loaded(TransformerXL(given.model), params, vocab, given, step, mesh)
