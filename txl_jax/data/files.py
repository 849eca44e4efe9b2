"""Local text: Python's standard library and the user's files."""

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from txl_jax.data.byte_ranges import (
    ByteRange,
    Splits,
    checksum,
    cut_by_lines,
    reading,
    size,
    whole,
)
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError

# How files are decompressed, by their suffix.
COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}

EXPANSION = 100  # text shrinks to a tenth, repeated lines to a hundredth


def _files_below(folder: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Returns the files below a folder, sorted by relative POSIX path.

    `skip` is called with the name of every folder and file.
    """

    def stop(error: OSError) -> None:
        raise error

    files = []
    with reading(folder):
        for where, folders, names in os.walk(folder, onerror=stop):
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


def stdlib_split(relative: str) -> str:
    """Returns the split of a library file, which depends only on its path."""
    digest = hashlib.sha256((_STDLIB_SALT + relative).encode()).digest()
    number = int.from_bytes(digest[:8], "big") % 32
    return {0: "valid", 1: "test"}.get(number, "train")


def split_stdlib() -> Splits:
    """Returns the splits of the running Python's library, which are whole files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[ByteRange]] = {split: [] for split in SPLITS}
    for path in _files_below(root, _STDLIB_SKIP.__contains__):
        if path.suffix == ".py" and path.is_file():
            split = stdlib_split(path.relative_to(root).as_posix())
            splits[split].append(whole(path))
    return {split: tuple(ranges) for split, ranges in splits.items()}


def text_edition(path: str) -> str:
    """Returns a hash of the paths and contents of the user's files.

    Reads all of them, so that no change goes unnoticed: about a second per GB.
    """
    digest = hashlib.sha256()
    with reading(path):
        for file in text_files(path):
            digest.update(os.fsencode(f"{file.resolve()}\0{checksum(file)}\n"))
    return digest.hexdigest()[:16]


def split_text(path: str, scratch: Path) -> Splits:
    """Returns the splits of the user's files, compressed ones unpacked in `scratch`."""
    files, ranges = text_files(path), []
    for number, file in enumerate(files):
        if file.suffix in COMPRESSED:
            target = scratch / str(number)
            with target.open("wb") as out:
                out.writelines(read_blocks(file))
            file = target
        ranges.append(whole(file))
    if not size(ranges):
        raise UserError(f"data.path={path!r} has no text: all its files are empty")
    return _split_by_name(path, files, ranges) or cut_by_lines(ranges)


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of a file in blocks, decompressed by its suffix.

    Raises UserError for a compressed file that unpacks to an implausible size.
    """
    most = max(EXPANSION * whole(path).stop, 1 << 24)
    unpacked = 0
    with reading(path):
        try:
            with COMPRESSED.get(path.suffix, Path.open)(path, "rb") as file:
                while block := file.read(1 << 20):
                    unpacked += len(block)
                    if unpacked > most and path.suffix in COMPRESSED:
                        raise UserError(
                            f"{path} unpacks to over {EXPANSION} times its size: if "
                            "that is intended, unpack it yourself"
                        )
                    yield block
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(
                f"cannot read {path} as {path.suffix} ({error}): it is damaged or has "
                "the wrong suffix, so replace it or rename it"
            ) from error


def read_stdin(field: str) -> bytes:
    """Returns all of stdin; raises UserError, naming the field, if it is closed."""
    if sys.stdin is None:
        raise UserError(f"{field}: stdin is closed: give a file, or text on stdin")
    return sys.stdin.buffer.read()


def text_files(path: str, field: str = "data.path") -> list[Path]:
    """Returns the files of a file, folder or glob, sorted, without hidden ones.

    `field` is the name of the path in errors.
    """
    if not path:
        raise UserError(f"{field} is empty: give a file, a folder or a glob")
    where = Path(path).expanduser()
    with reading(path):
        if where.is_file():
            return [where]
        if where.is_dir():
            files = _files_below(where, lambda name: name.startswith("."))
            problem = "is a folder without files: add some text"
        else:
            matches = sorted(glob.glob(str(where), recursive=True))
            files = [Path(match) for match in matches if not os.path.isdir(match)]
            problem = "does not exist: give a file, a folder or a glob"
            if glob.has_magic(path):
                problem = "matches no file: correct the glob, quoted in a shell"
        if not files:
            raise UserError(f"{field}={path!r} {problem}")
        for file in files:
            if not file.is_file():
                raise UserError(
                    f"{field}={path!r}: {file} is a broken link, a pipe or a device: "
                    "give files only"
                )
    return files


def _split_by_name(
    path: str, files: Sequence[Path], ranges: Sequence[ByteRange]
) -> Splits:
    """Returns train.*, valid.* and test.* as the splits, or {} if one is missing.

    A prefix "wiki.", as in wiki.train.tokens, is ignored.
    """
    top = min((file.parent for file in files), key=lambda folder: len(folder.parts))
    named = {
        file.name.removeprefix("wiki.").partition(".")[0]: part
        for file, part in zip(files, ranges, strict=True)
        if file.parent == top
    }
    if not named.keys() >= set(SPLITS):
        return {}
    if len(files) > len(SPLITS):
        # Concatenating all files would train on the test text.
        raise UserError(
            f"data.path={path!r} has train.*, valid.* and test.* and "
            f"{len(files) - len(SPLITS)} more files: leave only those three, or move "
            "them if they are not the splits"
        )
    return {split: (named[split],) for split in SPLITS}
