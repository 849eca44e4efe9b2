"""The modes `import` and `export`: models of other code bases."""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from filelock import FileLock

from txl_jax import config, metrics
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.checksum import first_nonfinite
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.config import Config
from txl_jax.convert import formats, huggingface
from txl_jax.convert.formats import Source
from txl_jax.convert.options import ConvertConfig
from txl_jax.data import vocab
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.report.progress import waiting
from txl_jax.runtime import storage
from txl_jax.update.init import abstract_params
from txl_jax.workdir import folder
from txl_jax.workdir.claim import IMPORTED
from txl_jax.workdir.load import Loaded

SCRATCH, LOCK = ".incomplete-", "lock"  # of the folder of an unfinished import
INCOMPLETE = "incomplete"  # on gs://, a file in the folder of an unfinished import


def import_model(
    options: ConvertConfig, workdir: Path, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """Creates a workdir from another code base's model.

    overrides: config fields of the other sections, which take precedence over the
        model's; data.vocab_path is the vocabulary to import.
    """
    for name in overrides:
        if name.startswith(("train.", "optim.")):
            raise UserError(
                f"--config.{name}: an imported model is not trained in its workdir; "
                "start a run from it with train.init_from"
            )
    refuse_used(workdir, "--workdir")
    overrides = dict(overrides)
    vocab_path = overrides.pop("data.vocab_path", "")
    with waiting(f"reading {options.source}"):
        source = formats.read(options, vocab_path, stated_fields(overrides))
    if name := first_nonfinite(source.params):
        raise UserError(f"{options.source}: parameter {name} is not finite")
    parsed = configure(source, workdir, overrides)
    check_shapes(source, parsed)
    with waiting(f"computing the SHA-256 of {options.source}"):
        sha256 = {str(path): checksum(path) for path in source.files}
    parameters = metrics.parameter_count(source.params)
    origin = {"format": options.format, "step": source.step, "sha256": sha256}
    run = provenance.provenance(dataclasses.asdict(parsed), {}, parameters)
    run[IMPORTED] = origin
    with complete_or_absent(workdir) as fresh:
        opened = open_checkpoints(fresh, parsed.checkpoint)
        with waiting(f"writing {workdir}"), closing(opened) as manager:
            save_restore.save_items(manager, source.step, {"params": source.params})
            manager.finish(source.step)
        vocab.save(source.vocab, fresh / folder.VOCAB)
        (fresh / folder.RUN).write_text(json.dumps(run, indent=2) + "\n", "utf-8")
        config.save_json(parsed, fresh / folder.CONFIG)
    return {
        "workdir": str(workdir),
        **origin,
        "parameters": parameters,
        "vocab": source.vocab.kind,
        "types": len(source.vocab),
        "model": dataclasses.asdict(parsed.model),
    }


def export_model(options: ConvertConfig, loaded: Loaded) -> dict[str, Any]:
    """Writes the model in the format of another code base."""
    require_one_of(options.format, ["huggingface"], "--format")
    if not options.target:
        raise UserError("give --target, the folder to create")
    if storage.is_remote(options.target):
        raise UserError(f"--target={options.target!r} must be a folder of this machine")
    storage.require_unicode(options.target, "--target")
    refuse_used(target := Path(options.target), "--target")
    params = jax.device_get(loaded.params)
    with complete_or_absent(target) as fresh:
        differences = huggingface.save_pretrained(
            loaded.config.model, params, loaded.vocab, fresh
        )
    for difference in differences:
        say(f"different in huggingface: {difference}")
    return {
        "target": str(target),
        "format": options.format,
        "step": loaded.step,
        "differences": differences,
    }


def stated_fields(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Returns the model fields among the overrides, which the reader needs."""
    c = config.default()
    names = [name for name in formats.MODEL_FIELDS if f"model.{name}" in overrides]
    for name in names:
        config.override(c, f"model.{name}", overrides[f"model.{name}"])
    return {name: c.model[name] for name in names}


def configure(source: Source, workdir: Path, overrides: Mapping[str, str]) -> Config:
    """Returns the config of an imported model, which is evaluated as it was trained."""
    c, model = config.default(source.model), source.model
    c.eval.update({name: getattr(model, name) for name in formats.LENGTHS})
    c.generate.update(mem_len=model.mem_len, prompt=default_prompt(source.vocab))
    c.data.vocab_path = str(storage.absolute(workdir) / folder.VOCAB)
    for name, text in overrides.items():
        config.override(c, name, text)
    return config.parse(c)


def default_prompt(vocab: Vocab) -> str:
    """Returns a newline, or the first token if the vocabulary has no newline."""
    try:
        vocab.encode("\n")
        return "\n"
    except UserError:
        return vocab.decode([0])


def check_shapes(source: Source, parsed: Config) -> None:
    """Raises UserError if overrides changed the shape of a parameter."""
    actual = save_restore.shapes(source.params)
    expected = save_restore.shapes(nn.unbox(abstract_params(parsed.model)))
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise UserError(
                f"the config's model has {name} of shape {expected.get(name)}, the "
                f"source {actual.get(name)}: leave the model's sizes unchanged"
            )


def refuse_used(path: Path, flag: str) -> None:
    """Raises UserError unless the path is missing, empty or an unfinished import."""
    if storage.is_remote(path) and (path / INCOMPLETE).exists():
        if not (path / folder.CONFIG).exists():  # not trained in since then
            return
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if used:
        raise UserError(f"{flag}={str(path)!r} is not an empty folder: give a new one")


def remove_killed(path: Path) -> None:
    """Removes temporary folders of killed imports into `path`: their locks are free."""
    for parent in path.parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # a Timeout if the import is running
            if (parent / path.name).exists():
                with FileLock(parent / LOCK, timeout=0):
                    shutil.rmtree(parent)


@contextlib.contextmanager
def complete_or_absent(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` when the block succeeds.

    On gs://, where nothing is renamed, it is `path` itself, and a file marks it until
    then. What an unfinished import left there is removed.
    """
    if storage.is_remote(path):
        mark = path / INCOMPLETE
        mark.write_text("The import has not finished.\n")
        for old in path.iterdir():
            if old.name != INCOMPLETE:
                old.rmtree() if old.is_dir() else old.unlink()  # type: ignore
        yield path
        mark.unlink()
        return
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_killed(path)
        scratch = tempfile.TemporaryDirectory(dir=path.parent, prefix=SCRATCH)
        with scratch as parent:  # only its owner may read it, unlike a folder inside
            fresh = Path(parent, path.name)
            with FileLock(Path(parent, LOCK)):
                fresh.mkdir()
                yield fresh
                for each in (*fresh.rglob("*"), fresh):
                    storage.sync(each)
                fresh.rename(path)
                storage.sync(path.parent)
    except OSError as error:
        failure = f"cannot write {storage.place(error) or path} ({error.strerror})"
        raise UserError(f"{failure}: give another folder") from error
