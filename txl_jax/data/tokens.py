"""Token files: each split of a corpus as a flat array on disk, which is memory-mapped.

The folder is `<data_dir>/txl_jax/<corpus>-<edition>/<version>/<recipe>/`; for a
published corpus, TFDS's blocks lie beside it. It exists only when it is complete. On
gs://, it is copied once to each host, because the files are memory-mapped.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from txl_jax.data import corpora
from txl_jax.data import vocab as vocabulary
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.encode import Encoder, Recipe, resolve
from txl_jax.data.options import AGAIN, FROM_CORPUS, SPLITS, DataConfig
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, programs, storage
from txl_jax.runtime.explain import failed_path, one_line, storage_errors
from txl_jax.runtime.storage import Json, refusing_damage

MANIFEST = "manifest.json"
RemotePath = Any  # an `epath.Path`; its module is imported only for gs://
VOCAB = "vocab.json"


@dataclass(frozen=True)
class Tokens:
    """A prepared corpus.

    `manifest` has corpus, edition, version, convention, vocab (the kind), types, dtype,
    files (their SHA-256s) and, per split, its SHA-256 and its numbers of tokens,
    unknowns, bytes in the stream, original_bytes, words and lines.
    """

    folder: Path
    vocab: Vocab
    manifest: Json
    _verified: dict[str, int] = field(default_factory=dict)  # when last changed, in ns

    def split(self, name: str) -> np.ndarray:
        """Returns a read-only memory map of a split, whose checksum is verified."""
        path = self.folder / f"{name}.bin"
        changed = path.stat().st_mtime_ns
        if self._verified.get(name) != changed:
            digest = checksum(path)
            with refusing_damage(self.folder, AGAIN):
                if digest != self.manifest["splits"][name]["sha256"]:
                    raise ValueError(f"{path.name} has changed since it was prepared")
            self._verified[name] = changed
        return np.memmap(path, self.vocab.dtype, "r")

    def denominators(self, name: str) -> dict[str, int]:
        """Returns the denominators of a split's metrics.

        `bytes` counts the stream, which may omit some of the `original_bytes`. Numbers
        have only `tokens`.
        """
        entry = self.manifest["splits"][name]
        names = ("tokens", "bytes", "original_bytes", "words", "lines")
        return {key: entry[key] for key in names if key in entry}


def copies(config: DataConfig) -> list[RemotePath]:
    """Returns the folders, local and on gs://, with copies of a corpus."""
    root, remote = _roots(config)
    name = f"txl_jax/{corpora.find_source(config, root).name}"
    return [folder / name for folder in (root, remote) if folder]


def _roots(config: DataConfig) -> tuple[Path, RemotePath | None]:
    """Returns the local data_dir, and the data_dir on gs:// or None."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"  # as in TFDS
    data_dir = config.data_dir or default
    if "://" not in data_dir:
        return storage.local_path(data_dir, "data.data_dir").absolute(), None
    # A folder of this host mirrors the remote one.
    name = hashlib.sha256(data_dir.rstrip("/").encode()).hexdigest()[:16]
    remote = storage.remote_path(data_dir, "data.data_dir")
    return programs.user_cache() / name, remote


def prepare(
    config: DataConfig,
    vocab: Vocab | None = None,
    trained_on: Mapping[str, str] | None = None,
) -> Tokens:
    """Prepares the tokens of a corpus unless they exist, and returns them.

    vocab, trained_on: the vocabulary of the model that will read them, and the SHA-256s
    of the splits of its own corpus, if known. Raises UserError if they differ.

    Among several processes the first one prepares the corpus, then the processes that
    do not share its disk. A signal stops the preparation immediately; the next run
    continues it.
    """
    with distributed.first_before_others():
        tokens = _prepare(config)
    corpus_vocab = tokens.vocab.to_json()
    given = (vocab or tokens.vocab).to_json()
    # The marks of lines may differ.
    if given.get("words", given) != corpus_vocab.get("words", corpus_vocab):
        raise UserError(
            "the model has another vocabulary than the corpus: set data.vocab_path to "
            f"the vocab.json of its workdir, data.vocab to {FROM_CORPUS!r} and "
            "data.vocab_size to 0"
        )
    sha256 = {name: each["sha256"] for name, each in tokens.manifest["splits"].items()}
    if trained_on and trained_on != sha256:
        raise UserError(
            f"the model was trained on another version of corpus {config.corpus!r}, so "
            "it may have seen what would be read: restore the version of its run.json, "
            "or score other texts with the mode score"
        )
    return tokens


def _prepare(config: DataConfig) -> Tokens:
    """Prepares a corpus in this process.

    The folder appears complete or not at all, also if the process is killed or others
    prepare the same corpus. With a remote data_dir, the local folder is copied from the
    bucket, or to the bucket if it is not there.
    """
    root, remote = _roots(config)
    given: Path | None = None  # the vocabulary's file
    if config.vocab_path:
        given = storage.user_path(config.vocab_path, "data.vocab_path")
    source = corpora.find_source(config, root)
    published = corpora.vocab_file(source.corpus, root)
    recipe, vocab = resolve(config, source.corpus, given, published)
    name = f"txl_jax/{source.name}/{source.corpus.version}/{recipe.folder}"
    folder = root / name
    manifest = ""  # the bucket's, if its copy is complete
    if remote:
        remote /= name
        with _reporting("read", remote):
            path = remote / MANIFEST
            manifest = path.read_text() if path.exists() else ""
    try:
        if not _is_complete(folder, manifest):
            lock = root / "txl_jax" / f"{source.name}.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            with waiting(f"data: waiting for another process to prepare {lock.stem}"):
                held = FileLock(lock).acquire()
            with held:
                # The process that held the lock before may have made it.
                if not _is_complete(folder, manifest):
                    if manifest:
                        _fetch(remote, manifest, folder)
                    else:
                        _make(source, recipe, vocab, folder)
        if remote and not manifest:
            _store(remote, folder)
    except OSError as error:
        raise UserError(
            f"cannot write {failed_path(error) or folder} ({error.strerror}): make "
            f"room or set data.data_dir, now {str(root)!r}, to a writable folder"
        ) from error
    return load(folder)


def _is_complete(folder: Path, manifest: str) -> bool:
    """Returns whether the folder exists, with the bucket's manifest if there is one."""
    path = folder / MANIFEST
    return path.exists() and (not manifest or path.read_text("utf-8") == manifest)


def load(folder: Path) -> Tokens:
    """Opens prepared tokens."""
    with refusing_damage(folder, AGAIN):
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["files"][VOCAB] != checksum(folder / VOCAB):
            raise ValueError(f"{VOCAB} is another file")
        for name in SPLITS:
            (folder / f"{name}.bin").stat()
    return Tokens(folder, vocabulary.load(folder / VOCAB), manifest)


def _make(
    source: corpora.Source, recipe: Recipe, vocab: Vocab | None, folder: Path
) -> None:
    start = time.monotonic()
    say(f"data: preparing {source.name} in {folder}")
    place = folder.parent.parent
    for leftover in place.glob("incomplete.*"):  # from a killed preparation or TFDS
        shutil.rmtree(leftover)
    scratch = place / "incomplete.unpacked"
    scratch.mkdir(parents=True)
    try:
        # TFDS prepares the corpus in folder.parent, which must not exist before.
        text = source.open(scratch)
        with storage.replacing_folder(folder) as incomplete:
            encoder = Encoder(source.corpus, recipe, text)
            vocab, splits = encoder.encode(vocab, incomplete)
            vocabulary.save(vocab, incomplete / VOCAB)
            files = {f"{name}.bin": entry["sha256"] for name, entry in splits.items()}
            manifest = {
                "corpus": source.corpus.name,
                "edition": source.edition,
                "version": source.corpus.version,
                "convention": recipe.convention,
                "vocab": vocab.kind,
                "types": len(vocab),
                "dtype": vocab.dtype.name,
                "splits": splits,
                "files": {**files, VOCAB: checksum(incomplete / VOCAB)},
            }
            body = json.dumps(manifest, indent=2) + "\n"
            (incomplete / MANIFEST).write_text(body, "utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    counts = ", ".join(f"{name} {splits[name]['tokens']:,}" for name in splits)
    say(f"data: {counts} tokens in {time.monotonic() - start:.1f} s")


@contextlib.contextmanager
def _reporting(verb: str, remote: RemotePath) -> Iterator[None]:
    try:
        yield
    except storage_errors() as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise  # an error of the local disk
        raise UserError(
            f"cannot {verb} {remote} ({one_line(error)}): check the address "
            "and the permissions, or set data.data_dir to a local folder"
        ) from error


def _fetch(remote: RemotePath, manifest: str, folder: Path) -> None:
    """Copies the files that the manifest lists to a folder, and verifies them."""
    say(f"data: copying {remote} to {folder.parent}")
    with storage.replacing_folder(folder) as incomplete:
        with refusing_damage(remote, AGAIN):
            files = json.loads(manifest)["files"]
        for name, expected in files.items():
            path = incomplete / name
            with _reporting("read", remote):
                (remote / name).copy(path)
            with refusing_damage(remote, AGAIN):
                if (digest := checksum(path)) != expected:
                    raise ValueError(f"{name} has SHA-256 {digest}, not {expected}")
        (incomplete / MANIFEST).write_text(manifest, "utf-8")


def _store(remote: RemotePath, folder: Path) -> None:
    """Copies a folder to gs://, its manifest last: only then is it complete.

    Two hosts may copy it at once, because both write the same bytes.
    """
    say(f"data: copying {folder} to {remote}")
    names = sorted((path.name for path in folder.iterdir()), key=MANIFEST.__eq__)
    with _reporting("write", remote):
        for name in names:
            type(remote)(folder / name).copy(remote / name, overwrite=True)
