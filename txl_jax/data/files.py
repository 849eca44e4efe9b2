"""Local text: Python's standard library and the user's files."""

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from txl_jax.data.byte_ranges import (
    ByteRange,
    ByteRanges,
    cut_by_lines,
    size,
    unreadable,
    whole,
)
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError

Packed = gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile

# How files are decompressed, by their suffix.
COMPRESSED: dict[str, Callable[[Path], Packed]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def _files_below(folder: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Returns the files below a folder, sorted by relative POSIX path.

    `skip` is called with the name of every folder and file.
    """

    def stop(error: OSError) -> None:
        raise error

    files = []
    for where, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not skip(name)]
        files += [Path(where, name) for name in names if not skip(name)]
    files = [path for path in files if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


# The standard library of the running Python: 11 MB of text without a download.

_STDLIB_SKIP = frozenset(
    "test tests idlelib site-packages dist-packages __pycache__".split()
)

# valid and test each have one file in 32: 220 to 300 KB on Python 3.11 to 3.13. The
# salt balances them: no file is more than 19 % of its split, encoding tables are at
# most 7 %, and pydoc_data/topics.py (800 KB) is in train.
_STDLIB_SALT = "885:"
_STDLIB_HELD_OUT = {0: "valid", 1: "test"}


def stdlib_split(relative: str) -> str:
    """Returns the split of a library file, which depends only on its path."""
    digest = hashlib.sha256((_STDLIB_SALT + relative).encode()).digest()
    return _STDLIB_HELD_OUT.get(int.from_bytes(digest[:8], "big") % 32, "train")


def find_stdlib() -> tuple[str, dict[str, ByteRanges]]:
    """Returns Python's version and the splits of its library, which are whole files."""
    # Also in a virtual environment, this is the library of the running Python.
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[ByteRange]] = {split: [] for split in SPLITS}
    try:
        for path in _files_below(root, _STDLIB_SKIP.__contains__):
            if path.suffix == ".py":
                split = stdlib_split(path.relative_to(root).as_posix())
                splits[split].append(whole(path))
    except OSError as error:
        raise unreadable(error, root) from error
    return platform.python_version(), {k: tuple(v) for k, v in splits.items()}


# The user's text.


def find_text(path: str) -> tuple[str, dict[str, ByteRanges]]:
    """Returns a hash of the files' paths, sizes and dates, and their splits.

    If any is compressed, the splits are empty: sizes are unknown before `unpack_text`.
    """
    try:
        files = text_files(path)
        digest = hashlib.sha256()
        for file in files:
            stat = file.stat()
            state = f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(os.fsencode(state))
        edition = digest.hexdigest()[:16]
        if any(file.suffix in COMPRESSED for file in files):
            return edition, {}
        return edition, _split(path, files, tuple(map(whole, files)))
    except OSError as error:
        raise unreadable(error, path) from error


def unpack_text(path: str, scratch: Path) -> dict[str, ByteRanges]:
    """Returns the splits of the user's files, compressed ones unpacked in `scratch`."""
    ranges = []
    for number, file in enumerate(files := text_files(path)):
        if file.suffix in COMPRESSED:
            target = scratch / str(number)
            _decompress(file, target)
            file = target
        ranges.append(whole(file))
    return _split(path, files, tuple(ranges))


def _decompress(path: Path, target: Path) -> None:
    with target.open("wb") as out, _open(path) as file:
        while block := _read(path, file):
            out.write(block)


def _open(path: Path) -> Packed:
    try:
        return COMPRESSED[path.suffix](path)
    except OSError as error:
        raise unreadable(error, path) from error


def _read(path: Path, file: Packed) -> bytes:
    try:
        return file.read(1 << 20)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            f"cannot read {path} as {path.suffix} ({error}): it is damaged or has "
            "the wrong suffix, so replace it or rename it"
        ) from error


def read_text(path: Path) -> bytes:
    """Returns the content of a file, decompressed by its suffix."""
    try:
        if path.suffix not in COMPRESSED:
            return path.read_bytes()
        with _open(path) as file:
            return b"".join(iter(lambda: _read(path, file), b""))
    except OSError as error:
        raise unreadable(error, path) from error


def text_files(path: str, field: str = "data.path") -> list[Path]:
    """Returns the files of a file, folder or glob, sorted, without hidden ones.

    `field` is the name of the path in errors.
    """
    where = Path(path).expanduser()
    if where.is_file():
        return [where]
    if where.is_dir():
        files = _files_below(where, lambda name: name.startswith("."))
        if not files:
            raise UserError(
                f"{field}={path!r} is a folder without files: add some text"
            )
        return files
    if not glob.has_magic(path):
        raise UserError(
            f"{field}={path!r} does not exist: give a file, a folder or a glob"
        )
    matches = map(Path, sorted(glob.glob(str(where), recursive=True)))
    files = [file for file in matches if file.is_file()]
    if not files:
        raise UserError(
            f"{field}={path!r} matches no file: correct the glob, quoted in a shell"
        )
    return files


def _split(
    path: str, files: Sequence[Path], ranges: ByteRanges
) -> dict[str, ByteRanges]:
    """Returns the splits of `files`, whose texts are `ranges`."""
    if not size(ranges):
        raise UserError(f"data.path={path!r} has no text: all its files are empty")
    return _split_by_name(path, files, ranges) or cut_by_lines(ranges)


def _split_by_name(
    path: str, files: Sequence[Path], ranges: ByteRanges
) -> dict[str, ByteRanges]:
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
