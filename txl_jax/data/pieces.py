"""Pieces: a split as ordered stretches of files, before a byte of it is copied.

Dims: none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from txl_jax.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Piece:
    """The bytes `[start, stop)` of one file."""

    path: Path
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def whole(path: Path) -> Piece:
    """Returns a file as one piece; raises OSError if it is not there."""
    return Piece(path, 0, path.stat().st_size)


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


def cut_at(pieces: Sequence[Piece], bounds: Sequence[int]) -> dict[str, Pieces]:
    """Cuts the joined pieces into the splits at two byte offsets."""
    edges = pairwise((0, *bounds, size(pieces)))
    return {
        split: cut(pieces, *edge) for split, edge in zip(SPLITS, edges, strict=True)
    }


def cut_by_lines(pieces: Sequence[Piece]) -> dict[str, Pieces]:
    """Cuts the joined pieces 90/5/5, at line ends where there are any."""
    total = size(pieces)
    targets = (total * 90 // 100, total * 95 // 100, total)
    marks = [_line_end(pieces, *between) for between in pairwise(targets)]
    return cut_at(pieces, marks)


def _line_end(pieces: Sequence[Piece], at: int, limit: int) -> int:
    """Returns the first offset in `[at, limit)` that follows a newline, else `at`."""
    offset = max(at - 1, 0)
    for block in blocks(cut(pieces, offset, limit - 1), 1 << 20):
        if (found := block.find(b"\n")) >= 0:
            return offset + found + 1
        offset += len(block)
    return at


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
        raise unreadable(error, piece.path) from error
    if len(data) < piece.stop - piece.start:
        raise UserError(
            f"{piece.path} became shorter while it was read: prepare again when "
            "nothing writes to it"
        )
    return data


def unreadable(error: OSError, path: Path | str) -> UserError:
    """Returns what to raise for a file of the user's that cannot be read."""
    where = error.filename or path
    return UserError(f"cannot read {where} ({error.strerror}): make it readable")
