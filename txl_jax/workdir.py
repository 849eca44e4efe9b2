"""The folder of a run: what it is called inside, and whose it is."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from txl_jax import bucket, distributed, metrics, sharding, state
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.lock import InUse, held
from txl_jax.model.config import ModelConfig
from txl_jax.report import provenance
from txl_jax.report.writer import say
from txl_jax.seal import DAMAGE

CONFIG = "config.json"  # the run's config, resolved
RUN = "run.json"  # where its numbers come from
VOCAB = "vocab.json"
METRICS = "metrics.jsonl"
IMPORTED = "imported"  # in run.json: where a model that was trained elsewhere is from


def find(given: str) -> Path:
    """Returns the folder of a --workdir: of one on gs://, where it is worked on here.

    What the bucket holds is fetched, but for checkpoints: whoever reads one does that.
    """
    if "://" in given:
        return _open_bucket(bucket.address(given))
    folder = Path(given)
    try:
        folder.exists()
    except OSError as error:
        raise UserError(
            f"--workdir={given!r} cannot be used ({error.strerror}): give another"
        ) from error
    return folder


def _open_bucket(url: str) -> Path:
    if distributed.several() or distributed.find_others():
        raise UserError(
            f"--workdir={url} is for one process: of several each writes its part of a "
            "checkpoint, so give a folder of a file system that all of them see"
        )
    opened = bucket.Bucket(url)
    try:
        with held(opened.folder):
            opened.open(ours=True)
    except InUse:  # which keeps the folder as new as the bucket, or newer
        opened.open(ours=False)
    return opened.folder


def fit_vocab(config: Config, vocab_size: int) -> Config:
    """Returns the config with model.vocab_size set from the vocabulary."""
    given = config.model.vocab_size
    if given and given < vocab_size:
        raise UserError(
            f"model.vocab_size = {given} is less than the vocabulary's {vocab_size}; "
            "set it to 0 to take the vocabulary's"
        )
    model = dataclasses.replace(config.model, vocab_size=given or vocab_size)
    return dataclasses.replace(config, model=model)


def split_sizes(model: ModelConfig) -> list[tuple[str, str, int]]:
    """Returns what the mesh splits of a model: (letter in RULES, field, size)."""
    sizes = [
        ("D", "d_model", model.d_model),
        ("E", "d_embed", model.embed_size),
        ("H", "n_head", model.n_head),
        ("F", "d_inner", model.d_inner),
    ]
    if model.div_val > 1 and model.cutoffs:
        return [*sizes, ("V", "cutoffs[0]", model.cutoffs[0])]
    return [*sizes, ("V", "vocab_size", model.vocab_size)]


def fit_mesh(config: Config, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh; raises UserError unless devices and model divide over it."""
    mesh = sharding.make_mesh(config.mesh, devices)
    rules = dict(sharding.RULES)
    for letter, field, size in split_sizes(config.model):
        axis = rules[letter]
        if size % (parts := mesh.shape[axis]):
            raise UserError(
                f"model.{field} = {size} does not divide over mesh.{axis} = {parts}: "
                f"make it a multiple of {parts}, or lower mesh.{axis}"
            )
    return mesh


def refuse_imported(workdir: Path) -> None:
    """Raises UserError if the workdir has a model whose training cannot go on."""
    with contextlib.suppress(OSError, ValueError):
        if IMPORTED in json.loads((workdir / RUN).read_text("utf-8")):
            raise UserError(
                f"{workdir} holds an imported model, without the optimiser's state to "
                f"go on from: train with --config.train.init_from={workdir} in "
                "another --workdir"
            )


def refuse_another(workdir: Path, config: Config) -> None:
    """Raises UserError if the workdir belongs to a run with another config."""
    if (workdir / CONFIG).exists():
        saved = configs.parse(configs.load_json(workdir / CONFIG))
        refuse_conflicts(workdir, saved, config)


def claim(workdir: Path, config: Config, tokens: Tokens) -> None:
    """Makes `workdir` the folder of this run, or checks that it is.

    Raises UserError when it belongs to another config or to another state of the
    corpus. run.json gets one more of the run's starts. Reports libraries and devices
    that changed since the first: the run's numbers may then differ in the last bits
    from an uninterrupted run's. Of several processes all check and the first writes.
    """
    refuse_another(workdir, config)
    try:
        run = describe(config, tokens)
        run["starts"] = [*_earlier_starts(workdir, run), provenance.start(run)]
        if not distributed.is_first():
            return
        said = json.dumps(run, indent=2) + "\n"
        _write(workdir / CONFIG, lambda path: configs.save_json(config, path))
        _write(workdir / VOCAB, lambda path: vocabulary.save(tokens.vocab, path))
        _write(workdir / RUN, lambda path: path.write_text(said, "utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or workdir} ({error.strerror}): give "
            "another --workdir"
        ) from error


def refuse_conflicts(workdir: Path, saved: Config, given: Config) -> None:
    """Raises UserError when the workdir belongs to another config than `given`."""
    found = configs.conflicts(saved, given)
    if found:
        raise UserError(
            f"{workdir} belongs to another config ({'; '.join(found)}): give another "
            "--workdir, or leave these fields as they were"
        )


def describe(config: Config, tokens: Tokens) -> dict[str, Any]:
    """Returns what run.json says of the run."""
    model = fit_vocab(config, len(tokens.vocab)).model
    parameters = metrics.parameter_count(state.abstract_params(model))
    return provenance.provenance(
        dataclasses.asdict(config), tokens.manifest, parameters
    )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that a kill leaves as it was or as it is to be."""
    fresh = path.with_suffix(".tmp")
    write(fresh)
    fresh.replace(path)


def _earlier_starts(workdir: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the run's starts so far; refuses it on another state of the corpus."""
    path = workdir / RUN
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text("utf-8"))
        changed = before["data"]["splits"] != run["data"]["splits"]
        starts = list(before["starts"])
        differences = provenance.differences(starts[0], run)
    except DAMAGE as error:
        raise UserError(
            f"{path} is damaged ({error}): bring it back, or delete it to go on without"
        ) from error
    if changed:
        raise UserError(
            f"{workdir} was trained on another state of corpus "
            f"{run['data']['corpus']!r} (SHA-256 in {path}): bring that back, or give "
            "another --workdir"
        )
    for difference in differences:
        say(f"not bit-identical from here to how the run started: {difference}")
    return starts
