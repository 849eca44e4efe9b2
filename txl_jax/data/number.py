"""Sequences of integers: music, DNA or quantised signals, without a text.

A corpus of numbers is stored as little-endian int32, and each number is its own token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from txl_jax.data import files
from txl_jax.data.byte_ranges import (
    ByteRange,
    Splits,
    cut_at,
    reading,
    size,
    whole,
)
from txl_jax.data.options import SPLITS
from txl_jax.data.text import JsonObject, token_dtype, words
from txl_jax.errors import UserError

STORED = np.dtype("<i4")
CHUNK = 1 << 20  # numbers in memory at once


@dataclass(frozen=True)
class NumberVocab:
    """The numbers below a size, which are written with spaces between them."""

    size: int

    kind: ClassVar[str] = "number"
    unknown: ClassVar[int] = -1

    def __len__(self) -> int:
        return self.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the token files."""
        return token_dtype(self.size)

    def encode(self, text: str) -> np.ndarray:
        """Returns the numbers of a text; raises UserError for another word."""
        return self._check(_parse(text, "the text"), "the text")

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split, which is stored as STORED."""
        for block in blocks:
            yield self._check(np.frombuffer(block, STORED), name)

    def _check(self, numbers: np.ndarray, name: str) -> np.ndarray:
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.size:
            outside = numbers[(numbers < 0) | (numbers >= self.size)]
            raise UserError(
                f"{name} has the number {outside[0]}, which is not from 0 to "
                f"{self.size - 1}: correct it, or train with a greater data.vocab_size"
            )
        return numbers.astype(self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the numbers as text."""
        return " ".join(map(str, np.asarray(tokens).tolist()))

    def to_json(self) -> JsonObject:
        """Returns the content of a vocabulary's file."""
        return {"kind": self.kind, "size": self.size}


def largest(splits: Iterable[Iterator[bytes]]) -> int:
    """Returns the largest number of some splits."""
    return max(int(np.frombuffer(x, STORED).max()) for split in splits for x in split)


def read(path: Path | None, dtype: str) -> Iterator[np.ndarray]:
    """Yields the numbers of a file as STORED, in chunks; None is stdin.

    The file is a .npy, a .bin of `dtype` in little-endian order, or a text. Raises
    UserError if it contains anything but whole numbers from 0 to 2^31 - 1.
    """
    name = str(path or "stdin")
    for chunk in _chunks(path, name, dtype):
        yield _stored(chunk, name)


def _stored(numbers: np.ndarray, name: str) -> np.ndarray:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < 2**31:
        raise UserError(
            f"{name} has numbers from {numbers.min()} to {numbers.max()}, which are "
            "not from 0 to 2147483647: shift or quantise them, and check data.dtype"
        )
    return numbers.astype(STORED)


def _chunks(path: Path | None, name: str, dtype: str) -> Iterator[np.ndarray]:
    if path is None:
        yield _parse(files.read_stdin().decode("utf-8", "replace"), name)
    elif path.suffix in (".npy", ".bin"):
        array = _open(path, dtype)
        for start in range(0, len(array), CHUNK):
            yield np.asarray(array[start : start + CHUNK])
    else:
        for part in words(files.read_blocks(path), name):
            yield _parse(part, name)


def _open(path: Path, dtype: str) -> np.ndarray:
    """Returns the array of a binary file, which is memory-mapped."""
    with reading(path):
        if path.suffix == ".bin":
            if not dtype:
                raise UserError(f"{path} has bare numbers: state their data.dtype")
            kind = np.dtype(dtype).newbyteorder("<")
            if (length := path.stat().st_size) % kind.itemsize:
                raise UserError(
                    f"{path} has {length} bytes, which are no whole number of {dtype}: "
                    "correct data.dtype, or copy the file again"
                )
            return np.memmap(path, kind, "r") if length else np.zeros(0, kind)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(f"{path} is not a .npy file ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{path} has the shape {array.shape} and the dtype {array.dtype}: save one "
            "sequence of integers in each file"
        )
    return array


def _parse(text: str, name: str) -> np.ndarray:
    numbers = text.split()
    if not all(map(str.isdecimal, numbers)):
        word = next(x for x in numbers if not x.isdecimal())
        raise UserError(
            f"{name} has {word[:80]!r}, which is not a number: give whole numbers from "
            "0 on, with white space between them, such as '60 62 64'"
        )
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        raise UserError(f"{name} has a number of more than 63 bits") from None


def split_numbers(path: str, scratch: Path, document_end: str, dtype: str) -> Splits:
    """Returns the splits of the user's files: those that names state, or a cut.

    The files are converted in `scratch`. document_end: see DataConfig; it is a number.
    """
    paths = files.text_files(path)
    names, parts = files.named_splits(path, paths), dict[str, list[ByteRange]]()
    field = "data.document_end"
    end = _stored(_parse(document_end, field), field)
    for number, file in enumerate(paths):
        target = scratch / str(number)
        with target.open("wb") as out:
            for chunk in (*read(file, dtype), end):
                out.write(chunk.tobytes())
        parts.setdefault(names[number] if names else "", []).append(whole(target))
    if names:
        return {split: tuple(parts[split]) for split in SPLITS}
    total = size(parts[""]) // STORED.itemsize
    ends = [total * n // 100 * STORED.itemsize for n in (90, 95)]
    return cut_at(tuple(parts[""]), ends)
