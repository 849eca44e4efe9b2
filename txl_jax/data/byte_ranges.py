"""Byte ranges of files, which make up the text of a split."""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError


@dataclass(frozen=True)
class ByteRange:
    """The bytes `[start, stop)` of a file."""

    path: Path
    start: int
    stop: int
    packed: Path | None = None  # the file that `path` was unpacked from


BLOCK_BYTES = 1 << 20  # read at once
ByteRanges = tuple[ByteRange, ...]
Splits = dict[str, ByteRanges]


def whole(path: Path) -> ByteRange:
    """Returns the range of a whole file."""
    with reading(path):
        return ByteRange(path, 0, path.stat().st_size)


def size(ranges: Sequence[ByteRange]) -> int:
    """Returns the number of bytes in the ranges."""
    return sum(part.stop - part.start for part in ranges)


def cut(ranges: Sequence[ByteRange], start: int, stop: int) -> ByteRanges:
    """Returns the bytes `[start, stop)` of the concatenated ranges."""
    parts, begin = [], 0
    for part in ranges:
        low = part.start + max(start - begin, 0)
        begin += part.stop - part.start
        high = part.stop - max(begin - stop, 0)
        if low < high:
            parts.append(dataclasses.replace(part, start=low, stop=high))
    return tuple(parts)


def cut_at(ranges: Sequence[ByteRange], offsets: Sequence[int]) -> Splits:
    """Cuts the concatenated ranges into the splits.

    The offsets are the starts of valid and test; a single one gives both the rest.
    """
    first, last, total = offsets[0], offsets[-1], size(ranges)
    bounds = (0, first), (first, last if last > first else total), (last, total)
    return {
        split: cut(ranges, *bound) for split, bound in zip(SPLITS, bounds, strict=True)
    }


def cut_by_lines(ranges: Sequence[ByteRange]) -> Splits:
    """Cuts the concatenated ranges 90/5/5, at the first of ENDS that occurs there."""
    total = size(ranges)
    targets = (total * 90 // 100, total * 95 // 100, total)
    return cut_at(ranges, [_find_end(ranges, *pair) for pair in pairwise(targets)])


# Places to cut a text: after a line, a word or a UTF-8 character.
ENDS = tuple(map(re.compile, (rb"\n", rb"\s", rb"(?s:.)(?=[^\x80-\xbf])")))


def _find_end(ranges: Sequence[ByteRange], at: int, limit: int) -> int:
    """Returns the first end in `[at, limit)`, preferably a line's, or else `at`."""
    for end in ENDS:
        offset = max(at - 1, 0)
        for block in blocks(cut(ranges, offset, limit - 1)):
            if found := end.search(block):
                return offset + found.end()
            offset += len(block)
    return at


def blocks(
    ranges: Sequence[ByteRange], block_size: int = BLOCK_BYTES
) -> Iterator[bytes]:
    """Yields the concatenated ranges in blocks; only the last one may be shorter."""
    for start in range(0, size(ranges), block_size):
        yield b"".join(map(_read, cut(ranges, start, start + block_size)))


def _read(part: ByteRange) -> bytes:
    with reading(part.path), part.path.open("rb") as file:
        file.seek(part.start)
        return file.read(part.stop - part.start)


def locate(ranges: Sequence[ByteRange], offset: int) -> tuple[str, int]:
    """Returns the file and the byte in it at an offset in the ranges."""
    (part,) = cut(ranges, offset, offset + 1)
    return f"{part.packed}, unpacked," if part.packed else str(part.path), part.start


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Returns a file's checksum in hexadecimal; "git" is the hash of a git object."""
    with path.open("rb") as file:
        if algorithm == "git":
            start = f"blob {path.stat().st_size}\0".encode()
            return hashlib.file_digest(file, lambda: hashlib.sha1(start)).hexdigest()
        return hashlib.file_digest(file, algorithm).hexdigest()


def verify_file(path: Path, digest: str) -> None:
    """Raises UserError if a file's checksum differs from the published one."""
    algorithm, _, expected = digest.rpartition(":")
    with reading(path):
        actual = checksum(path, algorithm or "sha256") if digest else ""
    if actual != expected:
        raise UserError(
            f"{path} is truncated or a different file: its {algorithm or 'SHA-256'} is "
            f"{actual} instead of {expected}; get the file again"
        )


def require_regular(path: Path, field: str) -> None:
    """Raises UserError for a pipe or a device, which cannot be read again."""
    if os.path.exists(path) and not (path.is_file() or path.is_dir()):
        raise UserError(
            f"{field}={str(path)!r} is a pipe or a device: give a file with its content"
        )


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raises UserError if a user's file cannot be read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read {error.filename or path} ({reason}): make it readable"
        ) from error
