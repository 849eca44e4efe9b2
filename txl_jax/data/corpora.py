"""The corpora: what each one is and where its bytes lie (the paper's section 4.1).

A corpus is found as ordered pieces of files per split, before a byte of it is copied;
`builder` stores those bytes and `tokens` encodes them.

Dims: none.
"""

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from txl_jax.errors import UserError, nearest

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Piece:
    """The bytes `[start, stop)` of one file."""

    path: Path
    start: int
    stop: int


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Corpus:
    """The facts about one corpus.

    `find` takes `data.path` and returns the edition (whatever tells two states of the
    corpus apart) and the pieces of each split.
    """

    name: str
    about: str
    licence: str
    version: str  # raised when the same files would give other bytes or other splits
    takes_path: bool  # whether the user says where it is, with data.path
    find: Callable[[str], tuple[str, dict[str, Pieces]]]


@dataclass(frozen=True)
class Source:
    """A corpus as found on this machine."""

    corpus: Corpus
    edition: str
    splits: dict[str, Pieces]

    @property
    def config(self) -> str:
        """The name of the TFDS config and of the folder: corpus and edition."""
        return f"{self.corpus.name}-{self.edition}"


def find(name: str, path: str = "") -> Source:
    """Finds a corpus; every split has at least the two bytes that a score needs.

    Raises UserError for an unknown corpus, for a path that is missing, not wanted,
    empty or unreadable, and for a split that is too small.
    """
    if name not in CORPORA:
        hint = nearest(name, list(CORPORA))
        known = ", ".join(CORPORA)
        raise UserError(f"data.corpus={name!r} is unknown{hint}; known are: {known}")
    corpus = CORPORA[name]
    if path and not corpus.takes_path:
        raise UserError(
            f"data.path={path!r} is for data.corpus='text': corpus {name!r} has no "
            "path, so set data.corpus='text' or leave data.path empty"
        )
    if corpus.takes_path and not path:
        raise UserError(
            f"data.corpus={name!r} needs data.path: a file, a folder or a glob"
        )
    edition, splits = corpus.find(path)
    for split in SPLITS:
        if size(splits[split]) < 2:
            raise UserError(
                f"corpus {name!r}{f' at {path!r}' if path else ''} is too small: its "
                f"{split} split would have {size(splits[split])} bytes and needs at "
                "least 2; give it more text"
            )
    return Source(corpus, edition, splits)


def size(pieces: Sequence[Piece]) -> int:
    """Returns the number of bytes in the pieces."""
    return sum(piece.stop - piece.start for piece in pieces)


def cut(pieces: Sequence[Piece], start: int, stop: int) -> Pieces:
    """Returns the bytes `[start, stop)` of the joined pieces, as pieces."""
    parts, begin = [], 0
    for piece in pieces:
        low = piece.start + max(start - begin, 0)
        begin += piece.stop - piece.start
        high = piece.stop - max(begin - stop, 0)
        if low < high:
            parts.append(Piece(piece.path, low, high))
    return tuple(parts)


def blocks(pieces: Sequence[Piece], block_size: int) -> Iterator[bytes]:
    """Yields the joined pieces in blocks of `block_size` bytes, the last one shorter.

    Raises UserError for a file that cannot be read or is shorter than its piece.
    """
    for start in range(0, size(pieces), block_size):
        yield b"".join(map(_read, cut(pieces, start, start + block_size)))


def _read(piece: Piece) -> bytes:
    try:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            data = file.read(piece.stop - piece.start)
    except OSError as error:
        raise _unreadable(error, piece.path) from error
    if len(data) < piece.stop - piece.start:
        raise UserError(
            f"{piece.path} became shorter while it was read: prepare again when "
            "nothing writes to it"
        )
    return data


def _unreadable(error: OSError, path: Path | str) -> UserError:
    where = error.filename or path
    return UserError(f"cannot read {where} ({error.strerror}): make it readable")


def _whole(path: Path) -> Piece:
    return Piece(path, 0, path.stat().st_size)


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


def _find_stdlib(_: str) -> tuple[str, dict[str, Pieces]]:
    # Inside a virtual environment, too, this is the library that Python runs on.
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    try:
        for path in _files_below(root, _STDLIB_SKIP.__contains__):
            if path.suffix == ".py":
                split = stdlib_split(path.relative_to(root).as_posix())
                splits[split].append(_whole(path))
    except OSError as error:
        raise _unreadable(error, root) from error
    return platform.python_version(), {k: tuple(v) for k, v in splits.items()}


# Text of the user's own.


def _find_text(path: str) -> tuple[str, dict[str, Pieces]]:
    try:
        files = _text_files(path)
        digest = hashlib.sha256()
        for file in files:
            stat = file.stat()
            state = f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(os.fsencode(state))
        pieces = tuple(map(_whole, files))
    except OSError as error:
        raise _unreadable(error, path) from error
    if not size(pieces):
        raise UserError(
            f"data.path={path!r} has no text in it: all its files are empty"
        )
    splits = _split_by_name(path, files) or _split_by_size(pieces)
    return digest.hexdigest()[:16], splits


def _text_files(path: str) -> list[Path]:
    """Returns the files that `data.path` names, sorted; hidden ones are left out."""
    where = Path(path).expanduser()
    if where.is_file():
        return [where]
    if where.is_dir():
        files = _files_below(where, lambda name: name.startswith("."))
        if not files:
            raise UserError(f"data.path={path!r} is a folder without files: add text")
        return files
    if not glob.has_magic(path):
        raise UserError(
            f"data.path={path!r} does not exist: give a file, a folder or a glob"
        )
    found = map(Path, sorted(glob.glob(str(where), recursive=True)))
    files = [file for file in found if file.is_file()]
    if not files:
        raise UserError(
            f"data.path={path!r} matches no file: mend the glob (quote it in a shell)"
        )
    return files


def _split_by_name(path: str, files: list[Path]) -> dict[str, Pieces]:
    """Takes train.*, valid.* and test.* as the splits, or returns {} without them."""
    top = min((file.parent for file in files), key=lambda folder: len(folder.parts))
    named = {file.name.partition(".")[0]: file for file in files if file.parent == top}
    if not named.keys() >= set(SPLITS):
        return {}
    if len(files) > len(SPLITS):
        # Joining them all would put the test text where training sees it.
        raise UserError(
            f"data.path={path!r} has train.*, valid.* and test.* and "
            f"{len(files) - len(SPLITS)} more files: leave only those three, or move "
            "them if they are not the splits"
        )
    return {split: (_whole(named[split]),) for split in SPLITS}


def _split_by_size(pieces: Pieces) -> dict[str, Pieces]:
    """Cuts the joined text 90/5/5, at line ends where there are any."""
    total = size(pieces)
    targets = (total * 90 // 100, total * 95 // 100, total)
    marks = (_line_end(pieces, *between) for between in pairwise(targets))
    bounds = pairwise((0, *marks, total))
    return {
        split: cut(pieces, *bound) for split, bound in zip(SPLITS, bounds, strict=True)
    }


def _line_end(pieces: Pieces, at: int, limit: int) -> int:
    """Returns the first offset in `[at, limit)` that follows a newline, else `at`."""
    offset = max(at - 1, 0)
    for block in blocks(cut(pieces, offset, limit - 1), 1 << 20):
        if (found := block.find(b"\n")) >= 0:
            return offset + found + 1
        offset += len(block)
    return at


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="stdlib",
            about="The sources of the running Python's standard library, whole files",
            licence="PSF-2.0",
            version="1.0.0",
            takes_path=False,
            find=_find_stdlib,
        ),
        Corpus(
            name="text",
            about="The user's own files at data.path, joined in the order of names",
            licence="the user's",
            version="1.0.0",
            takes_path=True,
            find=_find_text,
        ),
    )
}
