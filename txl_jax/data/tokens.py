"""Token files: each split of a corpus as one flat array on disk, ready to be mapped.

They lie in `<data_dir>/txl_jax/<corpus>-<edition>/<version>/<recipe>/`, inside the
folder of the TFDS blocks that they come from, and are complete once that folder exists.

Dims: none; a split is one flat axis of tokens.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from txl_jax.data import corpora, mirror
from txl_jax.data import vocab as vocabulary
from txl_jax.data.download import checksum
from txl_jax.data.encode import Encoder, split_file
from txl_jax.data.progress import Say, log
from txl_jax.data.recipe import DataConfig, Recipe, resolve
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, nearest
from txl_jax.seal import DAMAGE

__all__ = ["DataConfig", "Tokens", "load", "prepare", "statistics"]

MANIFEST = "manifest.json"
VOCAB = "vocab.json"
MEND = "delete the folder and prepare again"


@dataclass(frozen=True)
class Tokens:
    """A prepared corpus.

    `manifest` holds corpus, edition, version, convention, vocab (the kind), types,
    dtype, files (the SHA-256 of each) and, per split, its numbers of tokens, unknowns,
    bytes of the stream, original_bytes, words and lines, and its SHA-256.
    """

    folder: Path
    vocab: Vocab
    manifest: dict[str, Any]

    def split(self, name: str) -> np.ndarray:
        """Returns a split, mapped read-only.

        Raises UserError for an unknown name, and for a file that is not what was
        prepared: it is read once to see that.
        """
        self._known(name)
        path = split_file(self.folder, name)
        digest = _digest(path, path.stat().st_mtime_ns)
        if digest != self.manifest["splits"][name]["sha256"]:
            raise UserError(f"{path} has changed since it was prepared: {MEND}")
        return np.memmap(path, self.vocab.dtype, "r")

    def denominators(self, name: str) -> dict[str, int]:
        """Returns what the total nll of a split may be divided by.

        `tokens`; `bytes` of the stream; `original_bytes` of the corpus, where the
        stream leaves some out; and `words`, a line end counted as one, as word-level
        results have it: their perplexity under any other vocabulary.
        """
        self._known(name)
        entry = self.manifest["splits"][name]
        counts = {key: entry[key] for key in ("tokens", "bytes", "original_bytes")}
        return counts | {"words": entry["words"] + entry["lines"]}

    def _known(self, name: str) -> None:
        if name not in self.manifest["splits"]:
            hint = nearest(name, list(corpora.SPLITS))
            known = ", ".join(corpora.SPLITS)
            raise UserError(f"split {name!r} is unknown{hint}; known are: {known}")


@functools.cache
def _digest(path: Path, changed_ns: int) -> str:
    """Returns a file's SHA-256, made anew when the file has changed."""
    del changed_ns
    return checksum(path)


def statistics(tokens: Tokens) -> dict[str, Any]:
    """Returns what `--mode=prepare` prints: a corpus's published figures, to compare.

    The manifest without the files' own digests, and where the files are.
    """
    manifest = {k: v for k, v in tokens.manifest.items() if k != "files"}
    return {**manifest, "folder": str(tokens.folder)}


def prepare(config: DataConfig, say: Say = log) -> Tokens:
    """Returns the tokens of a corpus, made first if they are not there.

    Safe against kills and against other processes that prepare the same corpus: the
    folder appears whole or not at all. `say` gets one line when it starts, one when it
    is done and one in ten seconds between. With a remote data_dir this host works in a
    folder of its own, which takes from the bucket what is there and gives what is not.
    Raises UserError for whatever in the config cannot work.
    """
    remote = mirror.is_remote(given := _given_dir(config))
    root = mirror.local_root(given) if remote else Path(given).expanduser().absolute()
    source = corpora.find(config.corpus, config.path, root, config.task)
    published = corpora.vocab_file(source.corpus, root)
    recipe, vocab = resolve(config, source.corpus, published)
    ours = root / "txl_jax"
    inside = f"{source.config}/{source.corpus.version}/{recipe.folder}"
    folder = ours / inside
    bucket = mirror.Mirror(given, f"txl_jax/{inside}", MANIFEST) if remote else None
    there = bucket.read_manifest() if bucket else ""
    try:
        if not _is_complete(folder, there):
            with _locked(ours / f"{source.config}.lock", say):
                if _is_complete(folder, there):
                    pass  # the process that held the lock made it
                elif bucket and there:
                    bucket.fetch(there, folder, say)
                else:
                    _make(source, recipe, vocab, root, folder, say)
        if bucket and not there:
            bucket.store(folder, say)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder} ({error.strerror}): make room or "
            f"set data.data_dir, now {given!r}, to a writable folder"
        ) from error
    return load(folder)


def _is_complete(folder: Path, manifest: str) -> bool:
    """Returns whether the folder is there, and is the bucket's if that has one."""
    path = folder / MANIFEST
    return path.exists() and (not manifest or path.read_text("utf-8") == manifest)


def load(folder: Path) -> Tokens:
    """Opens prepared tokens; raises UserError unless every file has its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        vocab = vocabulary.load(folder / VOCAB, MEND)
        for name in corpora.SPLITS:
            path = split_file(folder, name)
            expected = manifest["splits"][name]["tokens"] * vocab.dtype.itemsize
            if (actual := path.stat().st_size) != expected:
                raise UserError(
                    f"{path} has {actual} bytes instead of {expected}: {MEND}"
                )
    except (*DAMAGE, OSError) as error:
        raise UserError(f"{folder} is damaged ({error}): {MEND}") from error
    return Tokens(folder, vocab, manifest)


def _given_dir(config: DataConfig) -> str:
    """Returns the root of all prepared data; TFDS has the same default."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return config.data_dir or default


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Holds the lock of one corpus; the system frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"data: waiting for another process that prepares {path.stem}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    source: corpora.Source,
    recipe: Recipe,
    vocab: Vocab | None,
    root: Path,
    folder: Path,
    say: Say,
) -> None:
    """Writes the token folder beside its place and renames it there."""
    began = time.monotonic()
    size = f", {source.bytes:,} bytes," if source.bytes else ""
    say(f"data: preparing {source.config}{size} in {folder}")
    from txl_jax.data import builder  # imports TFDS: a second that re-use need not pay

    stored = builder.prepare(source, root, say)
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    for leftover in (incomplete, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    incomplete.mkdir()
    work = Encoder(
        source, recipe, incomplete, lambda split: builder.read(stored, split), say
    )
    try:
        vocab, splits = (
            work.encode(vocab) if vocab or recipe.kind != "word" else work.count()
        )
    except UserError:
        shutil.rmtree(incomplete)  # of no use to any other try
        raise
    vocabulary.save(vocab, incomplete / VOCAB)
    files = {f"{name}.bin": entry["sha256"] for name, entry in splits.items()}
    files[VOCAB] = hashlib.sha256((incomplete / VOCAB).read_bytes()).hexdigest()
    manifest = {
        "corpus": source.corpus.name,
        "edition": source.edition,
        "version": source.corpus.version,
        "convention": recipe.convention,
        "vocab": vocab.kind,
        "types": len(vocab),
        "dtype": vocab.dtype.name,
        "splits": splits,
        "files": files,
    }
    (incomplete / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    for path in (*incomplete.iterdir(), incomplete):
        _sync(path)
    incomplete.rename(folder)
    _sync(folder.parent)
    counts = ", ".join(f"{name} {splits[name]['tokens']:,}" for name in splits)
    say(f"data: {counts} tokens in {time.monotonic() - began:.1f} s")


def _sync(path: Path) -> None:
    """Forces a file or a folder to disk, so that a rename never outruns its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
