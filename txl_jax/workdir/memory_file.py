"""The memory after a text in a file, from which reading can continue many times.

It is an `array_file`. Checksums in its metadata identify the parameters, the vocabulary
and the model that it belongs to.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax import config as configs
from txl_jax.checkpoint import array_file
from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.array_checksum import checksums
from txl_jax.checkpoint.manifest import Manifest
from txl_jax.errors import UserError, prefixed
from txl_jax.evaluate.reader import Bookmark
from txl_jax.model.memory import Memory
from txl_jax.model.memory.key_values import NewestKeyValues
from txl_jax.model.memory.kinds import NOT_SAVED, Newest
from txl_jax.report import provenance
from txl_jax.report.checksum import KEY, Json, verify_checksum, with_checksum
from txl_jax.report.log import say
from txl_jax.runtime import distributed, storage
from txl_jax.workdir.load import Loaded

FORMAT = "txl_jax memory 1"  # the version that is written and read


def save_memory(
    path: str | Path, loaded: Loaded, memory: Newest, last_B: object
) -> None:
    """Writes a memory to a file, which belongs to the model `loaded`; raises UserError.

    memory: a `Memory` of all tokens but the last one of each text, last_B.
    """
    path = Path(path).expanduser()
    bookmark = Bookmark(memory, np.asarray(last_B, np.int32))
    manifest = Manifest(loaded.step, None, None, checksums(bookmark))
    owner = describe_owner(loaded) | {"versions": provenance.versions()}
    texts = {
        "owner": json.dumps(with_checksum(owner)),
        "manifest": json.dumps(manifest.to_json()),
    }
    content = array_file.pack(bookmark, FORMAT, texts)
    try:
        storage.write_atomically(path, lambda fresh: fresh.write_bytes(content))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose another file"
        ) from error


def load_memory(path: str | Path, loaded: Loaded) -> Bookmark:
    """Returns (memory, last_B) of a file: the memory and the next input of each text.

    The memory is a `Memory` if one was saved; the command line saves `NewestKeyValues`.
    Raises UserError if the file is damaged, or of another model than `loaded`.
    """
    path = Path(path).expanduser()
    with array_file.opened(path, FORMAT, "--save_memory") as (texts, arrays):
        owner = verify_checksum(json.loads(texts["owner"]))
        manifest = manifests.parse(texts["manifest"])
        last_B = arrays.pop("last_B")
        fields: dict[str, Any] = {
            name.removeprefix("memory/"): x for name, x in arrays.items()
        }
        kind = Memory if "h_NBMD" in fields else NewestKeyValues
        bookmark = Bookmark(kind(**fields), last_B)
        changed = checksums(bookmark).items() ^ manifest.arrays.items()
        if changed:
            raise ValueError(f"array {min(changed)[0]}: wrong checksum")
    for name, own in describe_owner(loaded).items():
        if owner.get(name) != own:
            raise UserError(
                f"{path} belongs to another {name} (of update {manifest.step}; this is "
                f"update {loaded.step}): give the model that made it, or make it again"
            )
    return bookmark


def describe_owner(loaded: Loaded) -> Json:
    """Returns checksums of all that must be the same to go on from a memory."""
    free = {*configs.having("free")} - {"model.recurrence"}
    fields = vars(loaded.config.model).items()
    model = {name: value for name, value in fields if f"model.{name}" not in free}
    parameters = checksums({"params": loaded.params})
    parts = {
        "model": model,
        "vocabulary": loaded.vocab.to_json(),
        "set of parameters": parameters,
    }
    return {name: with_checksum(part)[KEY] for name, part in parts.items()}


def open_bookmark(loaded: Loaded, section: str, most: int = 0) -> Bookmark | None:
    """Returns the bookmark of a section's field `memory`, None if it is empty.

    most: the number of texts that the section can continue, 0 = any. Raises UserError
    if the file cannot be read, or nothing could be saved.
    """
    options = getattr(loaded.config, section)
    if not (options.memory or options.save_memory):
        return None
    if distributed.several():
        raise UserError(
            f"{section}.memory and {section}.save_memory need one process: start it "
            "once"
        )
    model = loaded.config.model
    if model.retrieval_len or model.keeps_states:
        raise UserError(f"{section}: {NOT_SAVED}")
    if options.save_memory:
        target = Path(options.save_memory).expanduser()
        if target.is_dir() or not target.parent.is_dir():
            raise UserError(
                f"{section}.save_memory = {options.save_memory!r} is a folder, or its "
                "folder does not exist: give a file in a folder that exists"
            )
    if not options.memory:
        return None
    with prefixed(f"{section}.memory"):
        bookmark = load_memory(options.memory, loaded)
    texts, tokens = len(bookmark.last_B), int(bookmark.memory.filled_B.max())
    if 0 < most < texts:
        raise UserError(
            f"{section}.memory = {options.memory!r} is of {texts} texts: give the "
            "memory of one"
        )
    say(
        f"goes on from {options.memory}: {texts} text{'s' if texts > 1 else ''}, at "
        f"most {tokens:,} tokens in the memory"
    )
    return bookmark


def save_bookmark(loaded: Loaded, section: str, bookmark: Bookmark) -> None:
    """Writes a bookmark to the file of a section's field `save_memory`."""
    path = getattr(loaded.config, section).save_memory
    with prefixed(f"{section}.save_memory"):
        save_memory(path, loaded, *bookmark)
    texts = len(bookmark.last_B)
    say(f"the memory of {texts} text{'s' if texts > 1 else ''} is in {path}")
