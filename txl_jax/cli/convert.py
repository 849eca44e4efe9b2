"""The modes `import`, also of other code bases, and `export` of a model to one file."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from txl_jax import config
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manifest import first_nonfinite
from txl_jax.config import Config
from txl_jax.convert import formats
from txl_jax.convert.formats import ImportedModel
from txl_jax.convert.options import ConvertConfig
from txl_jax.convert.release import Release, read_release, save_release
from txl_jax.data import vocab
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.options import FROM_CORPUS
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.fields import Role, Values
from txl_jax.report import provenance
from txl_jax.report.log import say, waiting
from txl_jax.runtime import storage
from txl_jax.runtime.storage import Json
from txl_jax.update.state import parameter_count
from txl_jax.workdir import folder, run_record
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.release_file import check_config
from txl_jax.workdir.resolve import imported_config
from txl_jax.workdir.run_record import IMPORTED

INCOMPLETE = "incomplete"  # on gs://, a file in the folder of an unfinished import
# Entries of run.json, and of its first start, that are exported.
ORIGIN = (
    *("parameters", "git_revision", "versions", "device_kind", "device_count"),
    *("data", IMPORTED),
)


def import_model(options: ConvertConfig, workdir: Path, overrides: Values) -> Json:
    """Creates a workdir from another model, with overrides of its config."""
    refuse_used(workdir)
    place = options.source and str(storage.local_path(options.source, "--source"))
    options = dataclasses.replace(options, source=place)
    formats.check(options)
    with waiting(f"reading {options.source}"), explaining(options):
        source, saved, trained = read_model(options, overrides)
        sha256 = {str(path): checksum(path) for path in source.files}
    parsed = configure(source, saved, workdir, overrides)
    if isinstance(source.vocab, WordVocab) and not source.vocab.lines.eos:
        say("no word of the vocabulary marks the end of a line: lines are joined")
    if name := first_nonfinite(source.params):
        raise UserError(f"{options.source}: parameter {name} is not finite")
    parameters = parameter_count(source.params)
    origin = {"format": options.format, "step": source.step, "sha256": sha256}
    state = config.to_json(parsed)
    run = {
        "parameters": parameters,
        IMPORTED: origin | ({"origin": trained} if trained else {}),
        "starts": [provenance.start(state)],
    }
    with creating(workdir) as fresh:
        opened = save_restore.Checkpoints(fresh)
        with waiting(f"writing {workdir}"), opened as manager:
            manager.save_items(source.step, {"params": source.params})
            manager.finish(source.step)
        vocab.save(source.vocab, fresh / folder.VOCAB)
        (fresh / folder.RUN).write_text(json.dumps(run, indent=2) + "\n", "utf-8")
        text = json.dumps(state, indent=2) + "\n"
        (fresh / folder.CONFIG).write_text(text, "utf-8")
    say(f"{parameters:,} parameters imported to {workdir}")
    return {
        "workdir": str(workdir),
        **origin,
        "parameters": parameters,
        "vocab": source.vocab.kind,
        "types": len(source.vocab),
        "model": dataclasses.asdict(parsed.model),
    }


@contextlib.contextmanager
def explaining(options: ConvertConfig) -> Iterator[None]:
    """Adds a description of the source to a UserError if it has another format."""
    try:
        yield
    except UserError as error:
        description = folder.describe_path(Path(options.source))
        if not description or options.format in description:
            raise
        raise UserError(f"{error}; {options.source} is {description}") from error


def read_model(
    options: ConvertConfig, overrides: Values
) -> tuple[ImportedModel, Config, Json]:
    """Returns the model, its config, and its provenance, {} if that is unknown."""
    if options.format == formats.RELEASE:
        if vocab_path := overrides.get("data.vocab_path"):
            raise UserError(
                f"data.vocab_path = {vocab_path!r}, but {options.source} contains its "
                "vocabulary: leave the field out"
            )
        path = Path(options.source)
        release = read_release(path)
        saved = check_config(release.config, release.origin, path)
        source = ImportedModel(
            saved.model, release.params, release.vocab, release.step, [path]
        )
        return source, saved, release.origin
    stated = {f"model.{x}": x for x in formats.STATED_FIELDS}
    fields = {x: overrides[name] for name, x in stated.items() if name in overrides}
    data = {x: value for x, value in overrides.items() if x.startswith("data.")}
    source = formats.read_model(
        options, config.with_values(Config(), data).data, fields
    )
    return source, imported_config(source.model, source.vocab), {}


def configure(
    source: ImportedModel, saved: Config, workdir: Path, overrides: Values
) -> Config:
    """Returns the config of an imported model; raises UserError for unfit overrides."""
    vocab_path = str(storage.absolute(workdir) / folder.VOCAB)
    after = config.with_values(saved, overrides | {"data.vocab_path": vocab_path})
    for name in config.differences(saved, after):
        roles = config.FIELDS[name].roles
        if Role.ARCHITECTURE in roles or name.startswith(("train.", "optim.")):
            raise UserError(
                f"--config.{name}: the model was trained with another value; leave the "
                "flag out, or start a run from the model with train.init_from"
            )
    stated = overrides.get("data.vocab", FROM_CORPUS)
    if stated not in (FROM_CORPUS, source.vocab.kind):
        raise UserError(
            f"--config.data.vocab={stated}: the vocabulary is of kind "
            f"{source.vocab.kind!r}: leave the flag out"
        )
    return after


def export_model(options: ConvertConfig, loaded: Loaded, workdir: Path) -> Json:
    """Writes the model of a workdir to one file."""
    require_one_of(options.format, [formats.RELEASE], "--format")
    target = storage.local_path(options.target, "--target")
    remote = storage.is_remote(options.target)
    if remote or target.exists() or options.target.endswith("/"):
        raise UserError(
            f"--target={options.target!r} exists or is a folder, or is on gs://: give "
            "a new file on this machine"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    save_release(make_release(loaded, workdir), target, options.dtype)
    say(f"update {loaded.step} exported to {target}")
    return {
        "target": str(target),
        "format": options.format,
        "step": loaded.step,
        "sha256": {str(target): checksum(target)},
    }


def make_release(loaded: Loaded, workdir: Path) -> Release:
    """Returns a model without folders, files and devices of this machine."""
    fields = config.FIELDS.values()
    local = {x.name: x.default for x in fields if Role.LOCAL in x.roles}
    released = dataclasses.asdict(config.with_values(loaded.config, local))
    run = run_record.read_run(workdir)
    run |= run["starts"][0] if run else {}
    origin = {name: run[name] for name in ORIGIN if name in run}
    if imported := origin.get(IMPORTED):
        names = {Path(path).name: sha for path, sha in imported["sha256"].items()}
        origin[IMPORTED] = imported | {"sha256": names}
    return Release(released, loaded.params, loaded.vocab, loaded.step, origin)


def refuse_used(path: Path) -> None:
    """Raises UserError unless the path is missing, empty or an unfinished import."""
    if storage.is_remote(path) and (path / INCOMPLETE).exists():
        if not (path / folder.CONFIG).exists():  # no run has used it since
            return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"--workdir={str(path)!r} exists and is not an empty folder: give a new one"
        )


@contextlib.contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Yields a folder to write to, which becomes `path` if the block succeeds."""
    if not storage.is_remote(path):
        with storage.replacing_folder(path) as fresh:
            yield fresh
        return
    mark = path / INCOMPLETE
    mark.write_text("The import has not finished.\n")
    for old in path.iterdir():
        if old.name != INCOMPLETE:
            old.rmtree() if old.is_dir() else old.unlink()  # type: ignore
    yield path
    mark.unlink()
