"""Token files: each split of a corpus as one flat array on disk, ready to be mapped.

They lie in `<data_dir>/txl_jax/<corpus>-<edition>/<version>/<vocabulary>/`, inside the
folder of the TFDS blocks that they come from, and are complete once that folder exists.

Dims: none; a split is one flat axis of tokens.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from txl_jax.data import corpora
from txl_jax.data import vocab as vocabulary
from txl_jax.errors import UserError, nearest

MANIFEST = "manifest.json"
VOCAB = "vocab.json"


@dataclass(frozen=True)
class DataConfig:
    """Which text a run reads and how it is cut into tokens."""

    corpus: str = "stdlib"  # a name in corpora.CORPORA
    path: str = ""  # corpus "text" only: a file, a folder or a glob
    data_dir: str = ""  # where prepared data lies; "" = TFDS's own default
    vocab: str = "byte"  # a name in vocab.VOCABULARIES


@dataclass(frozen=True)
class Tokens:
    """A prepared corpus.

    `manifest` holds corpus, edition, version, vocab, dtype and, per split, the number
    of tokens, the number of bytes of text and the SHA-256 of the token file.
    """

    folder: Path
    vocab: vocabulary.ByteVocab
    manifest: dict[str, Any]

    def split(self, name: str) -> np.ndarray:
        """Returns a split, mapped read-only; raises UserError for an unknown name."""
        if name not in self.manifest["splits"]:
            hint = nearest(name, list(corpora.SPLITS))
            known = ", ".join(corpora.SPLITS)
            raise UserError(f"split {name!r} is unknown{hint}; known are: {known}")
        return np.memmap(_split_file(self.folder, name), self.vocab.dtype, "r")


def log(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def prepare(config: DataConfig, say: Callable[[str], None] = log) -> Tokens:
    """Returns the tokens of a corpus, made first if they are not there.

    Safe against kills and against other processes that prepare the same corpus: the
    folder appears whole or not at all. `say` gets one line when it starts and one when
    it is done. Raises UserError for whatever in the config cannot work.
    """
    kind = vocabulary.named(config.vocab)
    source = corpora.find(config.corpus, config.path)
    root = _data_dir(config.data_dir)
    ours = root / "txl_jax"
    folder = ours / source.config / source.corpus.version / kind.kind
    try:
        if not (folder / MANIFEST).exists():
            with _locked(ours / f"{source.config}.lock", say):
                if not (folder / MANIFEST).exists():
                    _make(source, kind(), root, folder, say)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder} ({error.strerror}): make room or "
            f"set data.data_dir, now {str(root)!r}, to a writable folder"
        ) from error
    return load(folder)


def load(folder: Path) -> Tokens:
    """Opens prepared tokens; raises UserError unless every file has its full size."""
    mend = "delete the folder and prepare again"
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        vocab = vocabulary.load(folder / VOCAB)
        for name in corpora.SPLITS:
            path = _split_file(folder, name)
            expected = manifest["splits"][name]["tokens"] * vocab.dtype.itemsize
            if (actual := path.stat().st_size) != expected:
                raise UserError(
                    f"{path} has {actual} bytes instead of {expected}: {mend}"
                )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder} is damaged ({error}): {mend}") from error
    return Tokens(folder, vocab, manifest)


def _data_dir(given: str) -> Path:
    """Returns the root of all prepared data; TFDS has the same default."""
    text = given or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    if "://" in text:
        raise UserError(
            f"data.data_dir={text!r} is not a local folder, and token files are mapped "
            "into memory: set data.data_dir to a folder on a disk"
        )
    return Path(text).expanduser().absolute()


def _split_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
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
    vocab: vocabulary.ByteVocab,
    root: Path,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Writes the token folder beside its place and renames it there."""
    began = time.monotonic()
    total = sum(map(corpora.size, source.splits.values()))
    say(f"data: preparing {source.config}, {total:,} bytes, in {folder}")
    from txl_jax.data import builder  # imports TFDS: a second that re-use need not pay

    blocks = builder.prepare(source, root)
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    for leftover in (incomplete, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    incomplete.mkdir()
    splits = {
        name: _write_split(
            _split_file(incomplete, name), builder.read(blocks, name), vocab
        )
        for name in corpora.SPLITS
    }
    manifest = {
        "corpus": source.corpus.name,
        "edition": source.edition,
        "version": source.corpus.version,
        "vocab": vocab.kind,
        "dtype": vocab.dtype.name,
        "splits": splits,
    }
    vocabulary.save(vocab, incomplete / VOCAB)
    (incomplete / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    for path in (*incomplete.iterdir(), incomplete):
        _sync(path)
    incomplete.rename(folder)
    _sync(folder.parent)
    counts = ", ".join(f"{name} {splits[name]['tokens']:,}" for name in splits)
    say(f"data: {counts} tokens in {time.monotonic() - began:.1f} s")


def _write_split(
    path: Path, blocks: Iterator[bytes], vocab: vocabulary.ByteVocab
) -> dict[str, Any]:
    """Writes the tokens of one split; returns its entry in the manifest."""
    tokens = text_bytes = 0
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks:
            encoded = vocab.encode(block)
            file.write(encoded.data)
            digest.update(encoded.data)
            tokens += len(encoded)
            text_bytes += len(block)
    return {"tokens": tokens, "bytes": text_bytes, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    """Forces a file or a folder to disk, so that a rename never outruns its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
