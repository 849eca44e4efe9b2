"""From another code base's files to a workdir, and from a workdir to such files."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax

from txl_jax import checkpoint, metrics, restore, workdir
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.convert import formats
from txl_jax.convert.formats import ConvertConfig, Source
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.report import provenance
from txl_jax.report.wait import waiting
from txl_jax.report.writer import say
from txl_jax.state import abstract_params


def import_model(
    how: ConvertConfig, folder: Path, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """Makes a workdir of another code base's model, ready to evaluate and generate.

    Overrides are of the other sections, and go before what the model says.
    """
    for name in overrides:
        if name.startswith(("train.", "optim.")):
            raise UserError(
                f"--config.{name}: an imported model is not trained in its workdir; "
                "give it to a run with train.init_from"
            )
    _refuse_used(folder, "--workdir")
    with waiting(f"reading {how.source}"):
        source = formats.read(how)
    config = _configure(source, folder, overrides)
    _check_shapes(source, config)
    with waiting(f"digesting {how.source}"):
        digests = {str(path): formats.sha256(path) for path in source.files}
    parameters = metrics.parameter_count(source.params)
    run = provenance.provenance(dataclasses.asdict(config), {}, parameters)
    origin = {"format": how.format, "step": source.step, "sha256": digests}
    run[workdir.IMPORTED] = origin
    with _made_whole(folder) as fresh:
        opened = checkpoint.open_checkpoints(fresh, config.checkpoint)
        with waiting(f"writing {folder}"), closing(opened) as manager:
            trees = {"params": source.params}
            checkpoint.save_items(manager, source.step, trees)
            manager.finish(source.step)
        vocabulary.save(source.vocab, fresh / workdir.VOCAB)
        said = json.dumps(run, indent=2) + "\n"
        (fresh / workdir.RUN).write_text(said, "utf-8")
        configs.save_json(config, fresh / workdir.CONFIG)
    return {
        "workdir": str(folder),
        **origin,
        "parameters": parameters,
        "vocab": source.vocab.kind,
        "types": len(source.vocab),
        "model": dataclasses.asdict(config.model),
    }


def export_model(how: ConvertConfig, loaded: restore.Loaded) -> dict[str, Any]:
    """Writes a workdir's model as another code base's files."""
    require_one_of(how.format, list(formats.TARGETS), "--format")
    if not how.target:
        raise UserError("give --target, the folder to make")
    _refuse_used(target := Path(how.target), "--target")
    params = jax.device_get(loaded.params)
    with _made_whole(target) as fresh:
        write = formats.TARGETS[how.format]
        differences = write(loaded.config.model, params, loaded.vocab, fresh)
    for difference in differences:
        say(f"not as here: {how.format}: {difference}")
    return {
        "target": str(target),
        "format": how.format,
        "step": loaded.step,
        "differences": differences,
    }


def _configure(source: Source, folder: Path, overrides: Mapping[str, str]) -> Config:
    model = source.model
    config = configs.default(model)
    seen = ("mem_len", "clamp_len", "same_length")
    config.eval.update({name: getattr(model, name) for name in seen})
    config.generate.mem_len = model.mem_len
    config.generate.prompt = _prompt(source.vocab)
    config.data.vocab_path = str((folder / workdir.VOCAB).absolute())
    for name, text in overrides.items():
        configs.override(config, name, text)
    return configs.parse(config)


def _prompt(vocab: Vocab) -> str:
    """Returns a line end, or the first token where the vocabulary has none."""
    try:
        vocab.encode("\n")
        return "\n"
    except UserError:
        return vocab.decode([0])


def _check_shapes(source: Source, config: Config) -> None:
    """Raises UserError if overrides left the weights no model to fit."""
    found = checkpoint.shapes(source.params)
    wanted = checkpoint.shapes(nn.unbox(abstract_params(config.model)))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"the config's model has {name} of shape {wanted.get(name)}, the "
                f"source {found.get(name)}: leave the model's sizes as they are"
            )


def _refuse_used(folder: Path, flag: str) -> None:
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    if used:
        raise UserError(f"{flag}={str(folder)!r} holds something: give a new folder")


@contextlib.contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Gives a folder beside `folder` that takes its place when all is written."""
    folder = folder.absolute()
    fresh = folder.with_name(f"{folder.name}.incomplete")
    try:
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(parents=True)
        yield fresh
        fresh.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder} ({error.strerror}): give another "
            "folder"
        ) from error
