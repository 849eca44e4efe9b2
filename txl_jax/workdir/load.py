"""Loads the model of a workdir, and the parameters that a new run starts from."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import Mesh

from txl_jax import config as configs
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.listing import has_checkpoint
from txl_jax.checkpoint.manifest import first_nonfinite, named_leaves
from txl_jax.config import Config
from txl_jax.convert.release import Release, read_release
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import DataConfig
from txl_jax.data.vocab import Vocab
from txl_jax.errors import BadNumbers, UserError, prefixed
from txl_jax.fields import Role
from txl_jax.model.modules import Params
from txl_jax.model.txl import TransformerXL
from txl_jax.report.log import say, waiting
from txl_jax.runtime import storage
from txl_jax.sharding.mesh import nearest_mesh
from txl_jax.update.state import init_params, like_params
from txl_jax.workdir.folder import CONFIG, VOCAB, find_workdir
from txl_jax.workdir.release_file import load_config, packaged
from txl_jax.workdir.resolve import NO_TOKENS, TokenIds, find_ids, fit_mesh, fit_vocab
from txl_jax.workdir.run_record import (
    check_same_run,
    read_run,
    saved_config,
    trained_on,
)


class Loaded(NamedTuple):
    """A trained model: `model.apply({"params": params}, tokens_BL, memory)`."""

    model: TransformerXL
    params: Params
    vocab: Vocab
    config: Config
    step: int
    mesh: Mesh
    ids: TokenIds = NO_TOKENS  # tokens that the config names
    trained_on: Mapping[str, str] = {}  # SHA-256 of its corpus's splits, if known


def load(workdir: str | Path, config: Config | None = None) -> Loaded:
    """Returns the trained model of a workdir, averaged if the run averages.

    `workdir` may also be the file of a released model, or the name of a model in the
    package, "shakespeare". `config` replaces the saved one, for the same model; its
    eval.checkpoint selects a checkpoint. Raises UserError if there is no such model,
    and BadNumbers for parameters that are not finite.
    """
    workdir, release = find_workdir(os.fspath(workdir)), None
    if not workdir.exists():
        workdir = packaged().get(str(workdir), workdir)
    if not storage.is_remote(workdir) and workdir.is_file():
        saved = load_config(workdir)
        release = read_release(workdir)
        vocab = release.vocab
    else:
        saved = saved_config(workdir)
        vocab = vocabulary.load(workdir / VOCAB)
    config = config or saved
    model = dataclasses.replace(saved, model=config.model)
    check_same_run(workdir, saved, model)
    config = fit_vocab(config, vocab)
    try:
        mesh = fit_mesh(config)
    except UserError:
        if config.mesh != saved.mesh:
            raise
        near = nearest_mesh(config.mesh, jax.device_count())
        old, new = map(dataclasses.astuple, (config.mesh, near))
        say(f"the run's mesh {old} does not fit this machine: reading on {new}")
        config = dataclasses.replace(config, mesh=near)
        mesh = fit_mesh(config)
    splits = trained_on(workdir, release.origin if release else read_run(workdir))
    loaded = load_fitted(workdir, config, vocab, mesh, release)
    return loaded._replace(trained_on=splits)


def load_fitted(
    workdir: Path,
    config: Config,
    vocab: Vocab,
    mesh: Mesh,
    release: Release | None = None,
) -> Loaded:
    """Returns the model of a fitted config, from `release` if it is in one file."""
    like, ids = like_params(config.model, mesh), find_ids(config, vocab)
    if release:
        step = release.step
        trees = release.params, like
        saved, expected = ({n: x.shape for n, x in named_leaves(y)} for y in trees)
        if other := sorted(dict(saved.items() ^ expected.items())):
            raise UserError(
                f"{workdir}: {', '.join(other[:3])} do not fit its config: export it "
                "again"
            )
        places = jax.tree.map(lambda x: x.sharding, like)
        params = jax.device_put(release.params, places)
    else:
        which = config.eval.checkpoint
        with waiting(f"reading checkpoint {which} of {workdir}"):
            params, step = save_restore.restore_params(workdir, which, like)
    if name := first_nonfinite(params):
        raise BadNumbers(
            f"parameter {name} in {workdir} is not finite: make the run again"
        )
    model = TransformerXL(config.model)
    return Loaded(model, params, vocab, config, step, mesh, ids)


def initial_data(config: Config, workdir: Path) -> DataConfig:
    """Returns config.data, with the vocabulary of train.init_from at the first start.

    Later starts read the copy in the workdir, so that they do not need the other run.
    """
    source, copy = config.train.init_from, storage.absolute(workdir) / VOCAB
    if not source or config.data.vocab_path != str(copy) or storage.is_file(copy):
        return config.data
    return dataclasses.replace(
        config.data, vocab_path=str(find_workdir(source) / VOCAB)
    )


def load_initial(
    config: Config, workdir: Path, vocab: Vocab, mesh: Mesh, like: Params
) -> Params | None:
    """Returns the parameters that a run starts from, or None for random ones.

    They come from the best checkpoint of train.init_from, averaged if that run
    averages; parameters that its model lacks or has in another shape are random. None
    also if `workdir` has a checkpoint. Raises UserError if they do not fit, and like
    `has_checkpoint`. like: the shapes and shardings of the result.
    """
    if has_checkpoint(workdir, like) or not config.train.init_from:
        return None
    with prefixed(f"train.init_from = {config.train.init_from!r}"):
        source = find_workdir(config.train.init_from)
        saved = saved_config(source)
        if not saved.model.vocab_size:
            saved = fit_vocab(saved, vocab)
        if vocabulary.load(source / VOCAB).to_json() != vocab.to_json():
            raise UserError(
                "its vocabulary is not this run's: use it with "
                f"data.vocab_path={str(source / VOCAB)!r}"
            )
        changes = {
            name: f"{name} is {old!r} there, {new!r} here"
            for name, (old, new) in configs.differences(saved, config).items()
            if name.startswith("model.")
        }
        wrong = [
            change
            for name, change in changes.items()
            if Role.ARCHITECTURE in configs.FIELDS[name].roles
        ]
        if wrong:
            raise UserError(
                f"its model differs ({'; '.join(wrong)}): set these fields as in its "
                f"{CONFIG}"
            )
        there = like_params(saved.model, mesh)
        params, step = save_restore.restore_params(source, "best", there)
    but = f", but {'; '.join(changes.values())}" if changes else ""
    say(f"starts from update {step} of {source}, with its model and vocabulary{but}")
    flat, expected = (flatten_dict(x, sep="/") for x in (params, like))
    shapes = {name: x.shape for name, x in flat.items()}
    if missing := sorted(x for x in expected if expected[x].shape != shapes.get(x)):
        say(f"initialized {', '.join(missing)}, which the source's model lacks")

        def make() -> dict[str, Array]:
            key, _ = jax.random.split(jax.random.key(config.train.seed))
            fresh = nn.unbox(init_params(config.model, key))
            return {name: flatten_dict(fresh, sep="/")[name] for name in missing}

        places = {name: expected[name].sharding for name in missing}
        flat |= jax.jit(make, out_shardings=places)()
    return unflatten_dict({name: flat[name] for name in expected}, sep="/")
