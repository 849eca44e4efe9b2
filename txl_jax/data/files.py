"""Local text: Python's standard library and the user's files."""

import bz2
import codecs
import dataclasses
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from txl_jax.data.byte_ranges import (
    BLOCK_BYTES,
    ByteRange,
    ByteRanges,
    Splits,
    blocks,
    checksum,
    cut_by_lines,
    reading,
    require_regular,
    size,
    whole,
)
from txl_jax.data.options import SPLIT_NAMES, SPLITS, STDIN
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import storage

# Functions that open compressed files, by suffix.
COMPRESSED: dict[str, Callable[[Path, str], Any]]
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

HEAD = 8000  # first bytes of a file, in which text has no NUL byte


def _files_below(folder: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Returns the files below a folder, sorted, without the names to skip."""

    def fail(error: OSError) -> None:
        raise error  # os.walk ignores errors

    files = []
    for where, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not skip(name)]
        files += [Path(where, name) for name in names if not skip(name)]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


_STDLIB_SKIP = frozenset(
    "test tests idlelib site-packages dist-packages __pycache__".split()
)

# valid and test each have one file in 32: 220 to 300 KB on Python 3.11 to 3.13. The
# salt balances them: no file is more than 19 % of its split, encoding tables are at
# most 7 %, and pydoc_data/topics.py (800 KB) is in train.
_STDLIB_SALT = "885:"


def split_stdlib() -> Splits:
    """Assigns the files of the running Python's library to splits.

    The split of a file depends only on its path.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[ByteRange]] = {split: [] for split in SPLITS}
    for path in _files_below(root, _STDLIB_SKIP.__contains__):
        if path.suffix == ".py" and path.is_file():
            name = _STDLIB_SALT + path.relative_to(root).as_posix()
            digest = hashlib.sha256(name.encode()).digest()
            split = {0: "valid", 1: "test"}.get(digest[7] % 32, "train")
            splits[split].append(whole(path))
    return {split: tuple(ranges) for split, ranges in splits.items()}


def text_edition(path: str, document_end: str = "") -> str:
    """Returns a hash of the paths and contents of the user's files.

    Reads all of them, so that no change goes unnoticed: about a second per GB.
    """
    digest = hashlib.sha256(os.fsencode(document_end))
    with reading(path):
        for file in corpus_files(path):
            digest.update(os.fsencode(f"{file.resolve()}\0{checksum(file)}\n"))
    return digest.hexdigest()[:16]


def split_text(path: str, scratch: Path, document_end: str = "") -> Splits:
    """Returns the splits of the user's files: stated by names, or else a cut.

    Compressed files are unpacked in `scratch`. document_end: see DataConfig.
    """
    files = corpus_files(path)
    splits, texts = named_splits(path, files), []
    for number, file in enumerate(files):
        packed = file.suffix in COMPRESSED
        if (file.stem if packed else file.name).endswith((".jsonl", ".ndjson")):
            raise UserError(
                f"{file} is JSON lines, not text: convert it, with jq -r .text if that "
                "is the field of the text, or rename it to read it unchanged"
            )
        if packed:
            target = scratch / str(number)
            with target.open("wb") as out:
                out.writelines(read_blocks(file))
            texts.append(dataclasses.replace(whole(target), packed=file))
        else:
            with reading(file), file.open("rb") as opened:
                start = mark_size(opened.read(HEAD), file)
            texts.append(dataclasses.replace(whole(file), start=start))
    if not splits:
        return cut_by_lines(_join(texts, scratch, document_end))
    parts: dict[str, list[ByteRange]] = {split: [] for split in SPLITS}
    for split, text in zip(splits, texts, strict=True):
        parts[split].append(text)
    return {split: _join(parts[split], scratch, document_end) for split in SPLITS}


def _join(texts: Sequence[ByteRange], scratch: Path, end: str) -> ByteRanges:
    """Returns the texts, each on its own lines and followed by `end` if that is set."""
    path = scratch / "border"
    path.write_bytes(b"\n" + (os.fsencode(end) + b"\n" if end else b""))
    border, parts = whole(path), []
    for text in texts:
        if size([text]):
            (last,) = blocks([dataclasses.replace(text, start=text.stop - 1)], 1)
            parts += [text, dataclasses.replace(border, start=int(last == b"\n"))]
    return tuple(parts if end else parts[:-1])


def mark_size(head: bytes, name: Path | str) -> int:
    """Returns the length of the byte order mark of UTF-8 at the start of a text.

    `head` has the first HEAD bytes. Raises UserError if they are not text.
    """
    if b"\0" in head[:HEAD]:
        raise UserError(
            f"{name} is not text in UTF-8, because it has NUL bytes: unpack or convert "
            "it first"
        )
    return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


def read_blocks(path: Path | None) -> Iterator[bytes]:
    """Yields the blocks of a file, decompressed by its suffix; None is stdin."""
    if path is None:
        data = sys.stdin.buffer.read()
        yield data[mark_size(data, "stdin") :]
        return
    try:
        with COMPRESSED.get(path.suffix, Path.open)(path, "rb") as file:
            block = file.read(BLOCK_BYTES)
            yield block[mark_size(block, path) :]
            while block := file.read(BLOCK_BYTES):
                yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            f"cannot read {path} ({error}): make it readable, or rename it if "
            f"{path.suffix} is the wrong suffix"
        ) from error


def text_inputs(path: str, field: str) -> list[Path | None]:
    """Returns the files of a path as `text_files` does, or [None] for stdin."""
    return [None] if path == STDIN else [*text_files(path, field)]


def text_files(path: str, field: str = "data.path") -> list[Path]:
    """Returns the files of a file, folder or glob, sorted, without hidden ones.

    `field` is the name of the path in errors.
    """
    where = storage.local_path(path, field)
    if not path:
        files = []
    elif os.path.isdir(where):
        files = _files_below(where, lambda name: name.startswith("."))
    elif os.path.exists(where):
        files = [where]
    else:
        matches = sorted(glob.glob(str(where), recursive=True))
        files = [Path(match) for match in matches if not os.path.isdir(match)]
    if not files:
        raise UserError(
            f"{field}={path!r} does not exist or has no files: give a file, a folder "
            "or a glob, quoted in a shell"
        )
    for file in files:
        require_regular(file, field)
    return files


def corpus_files(path: str) -> list[Path]:
    """Returns the files of data.path, without runs and prepared copies inside it."""
    files = text_files(path)
    top = Path(os.path.commonpath([file.parent for file in files]))
    below = {p for file in files for p in file.parents if top in p.parents}
    not_text = {
        folder
        for folder in below
        if {"config.json", "vocab.json"} <= {*os.listdir(folder)}
        or (folder.name == "txl_jax" and any(folder.glob("*.lock")))
    }
    return [file for file in files if not not_text.intersection(file.parents)]


def require_apart(path: str, workdir: Path) -> None:
    """Raises UserError if files of a run in `workdir` would be text of data.path."""
    parts = storage.local_path(path, "data.path").parts
    named = itertools.takewhile(lambda part: not glob.has_magic(part), parts)
    top, place = Path(*named).resolve(), workdir.resolve()
    if top in (place, *place.parents) and any(
        place in (folder := file.parent.resolve(), *folder.parents)
        for file in corpus_files(path)
    ):
        raise UserError(
            f"data.path={path!r} has files in the workdir {workdir}, whose own files "
            "would become text: give another --workdir"
        )


def named_splits(path: str, files: Sequence[Path]) -> list[str]:
    """Returns the splits that the names of files and folders state, or [].

    Raises UserError if some splits have no file or some files have no split: text that
    is meant for a test would be trained on.
    """
    top = os.path.commonpath([file.parent for file in files])
    splits = []
    names: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for name in (file.relative_to(top) for file in files):
        splits.append(" or ".join(sorted(_stated_splits(name))) or "no split")
        names.setdefault(splits[-1], []).append(name)
    listing = "; ".join(
        f"{split}: {some[0]}" + (f" and {len(some) - 1} more" if some[1:] else "")
        for split, some in names.items()
        if some
    )
    if {*splits} == {*SPLITS}:
        say(f"data: splits by name: {listing}")
        return splits
    if len(files) > 1 and {"valid", "test"} & {*" ".join(splits).split()}:
        raise UserError(
            f"data.path={path!r} has names of splits ({listing}): give train, valid "
            "and test and nothing else (valid can be the last lines of train), or "
            "rename files that are not splits"
        )
    return []


def _stated_splits(name: Path) -> set[str]:
    """Returns the splits that the first part of a path with any splits states.

    Splits are words between signs and digits; held-out and holdout count as words.
    """
    for part in name.parts:
        text = re.sub("h[eo]ld[-_ ]?out", "heldout", part.lower())
        words = re.split(r"[\W\d_]+", text)
        if stated := {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}:
            return stated
    return set()
