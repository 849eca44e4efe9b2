"""Text that lies on this machine already: Python's own library and the user's files.

Dims: none.
"""

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

from txl_jax.data.pieces import (
    SPLITS,
    Piece,
    Pieces,
    cut_by_lines,
    size,
    unreadable,
    whole,
)
from txl_jax.errors import UserError

Packed = gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile

# How a file with one of these endings is opened: its text is what comes out.
COMPRESSED: dict[str, Callable[[Path], Packed]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def _files_below(folder: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Returns the files below a folder, sorted by relative POSIX path.

    `skip` sees the bare name of every folder and file.
    """

    def stop(error: OSError) -> None:
        raise error

    files = []
    for where, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not skip(name)]
        files += [Path(where, name) for name in names if not skip(name)]
    files = [path for path in files if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


# The standard library of the running Python: real text of 11 MB that needs no network.

_STDLIB_SKIP = frozenset(
    "test tests idlelib site-packages dist-packages __pycache__".split()
)

# One file in 32 is held out for each of valid and test: 220 to 300 KB on Python 3.11,
# 3.12 and 3.13. The salt was chosen by sizes alone: no file is more than 19 % of its
# split, encoding tables are at most 7 %, and pydoc_data/topics.py (800 KB) trains.
_STDLIB_SALT = "885:"
_STDLIB_HELD_OUT = {0: "valid", 1: "test"}


def stdlib_split(relative: str) -> str:
    """Returns the split of a library file: by its path, so the same in any Python."""
    digest = hashlib.sha256((_STDLIB_SALT + relative).encode()).digest()
    return _STDLIB_HELD_OUT.get(int.from_bytes(digest[:8], "big") % 32, "train")


def find_stdlib() -> tuple[str, dict[str, Pieces]]:
    """Returns Python's version and the splits of its library, whole files each."""
    # Inside a virtual environment, too, this is the library that Python runs on.
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    try:
        for path in _files_below(root, _STDLIB_SKIP.__contains__):
            if path.suffix == ".py":
                split = stdlib_split(path.relative_to(root).as_posix())
                splits[split].append(whole(path))
    except OSError as error:
        raise unreadable(error, root) from error
    return platform.python_version(), {k: tuple(v) for k, v in splits.items()}


# Text of the user's own.


def find_text(path: str) -> tuple[str, dict[str, Pieces]]:
    """Returns what tells two states of the files apart, and their splits.

    With a compressed file among them there are no splits before `unpack_text`: its
    size is known only after reading it.
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


def unpack_text(path: str, scratch: Path) -> dict[str, Pieces]:
    """Returns the splits of the user's files, compressed ones unpacked in `scratch`."""
    pieces = []
    for number, file in enumerate(files := text_files(path)):
        if file.suffix in COMPRESSED:
            target = scratch / str(number)
            _decompress(file, target)
            file = target
        pieces.append(whole(file))
    return _split(path, files, tuple(pieces))


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
            f"cannot read {path} as {path.suffix} ({error}): it is damaged or of "
            "another kind, so make it again or rename it"
        ) from error


def read_text(path: Path) -> bytes:
    """Returns what is in a file, unpacked if it is compressed."""
    try:
        if path.suffix not in COMPRESSED:
            return path.read_bytes()
        with _open(path) as file:
            return b"".join(iter(lambda: _read(path, file), b""))
    except OSError as error:
        raise unreadable(error, path) from error


def text_files(path: str, field: str = "data.path") -> list[Path]:
    """Returns the files that a path names, sorted; hidden ones are left out.

    `field` is what an error calls it.
    """
    where = Path(path).expanduser()
    if where.is_file():
        return [where]
    if where.is_dir():
        files = _files_below(where, lambda name: name.startswith("."))
        if not files:
            raise UserError(f"{field}={path!r} is a folder without files: add text")
        return files
    if not glob.has_magic(path):
        raise UserError(
            f"{field}={path!r} does not exist: give a file, a folder or a glob"
        )
    found = map(Path, sorted(glob.glob(str(where), recursive=True)))
    files = [file for file in found if file.is_file()]
    if not files:
        raise UserError(
            f"{field}={path!r} matches no file: mend the glob (quote it in a shell)"
        )
    return files


def _split(path: str, files: Sequence[Path], pieces: Pieces) -> dict[str, Pieces]:
    """Returns the splits of `files`, whose text lies in `pieces`, one for one."""
    if not size(pieces):
        raise UserError(
            f"data.path={path!r} has no text in it: all its files are empty"
        )
    return _split_by_name(path, files, pieces) or cut_by_lines(pieces)


def _split_by_name(
    path: str, files: Sequence[Path], pieces: Pieces
) -> dict[str, Pieces]:
    """Takes train.*, valid.* and test.* as the splits, or returns {} without them.

    WikiText's own names are such too: wiki.train.tokens.
    """
    top = min((file.parent for file in files), key=lambda folder: len(folder.parts))
    named = {
        file.name.removeprefix("wiki.").partition(".")[0]: piece
        for file, piece in zip(files, pieces, strict=True)
        if file.parent == top
    }
    if not named.keys() >= set(SPLITS):
        return {}
    if len(files) > len(SPLITS):
        # Joining them all would put the test text where training sees it.
        raise UserError(
            f"data.path={path!r} has train.*, valid.* and test.* and "
            f"{len(files) - len(SPLITS)} more files: leave only those three, or move "
            "them if they are not the splits"
        )
    return {split: (named[split],) for split in SPLITS}
