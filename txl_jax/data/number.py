"""Sequences of integers, such as music, DNA or quantised signals.

A corpus of numbers is read as little-endian int32, and each number is its own token.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from txl_jax.data import files
from txl_jax.data.byte_ranges import reading
from txl_jax.data.options import SPLITS
from txl_jax.data.text import token_dtype
from txl_jax.errors import UserError
from txl_jax.runtime.storage import Json

STORED = np.dtype("<i4")
BLOCK_NUMBERS = 1 << 20  # read at once


@dataclass(frozen=True)
class NumberVocab:
    """The numbers below a size; as text, spaces separate them."""

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
        """Returns the numbers of a text; raises UserError for other words."""
        return self._check(parse_numbers(text, "the text"), "the text")

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split of dtype STORED."""
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

    def decode(self, tokens: Iterable[int], final: bool = True) -> str:
        """Returns the numbers as text."""
        return " ".join(map(str, np.asarray(tokens).tolist()))

    def to_json(self) -> Json:
        """Returns the content of a vocabulary's file."""
        return {"kind": self.kind, "size": self.size}


def parse_numbers(text: str, name: str) -> np.ndarray:
    """Returns the numbers of a text, which white space separates; raises UserError."""
    try:
        return np.array([int(word) for word in text.split()], np.int64)
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"{name} is not whole numbers with white space between them, such as "
            f"'60 62 64' ({error})"
        ) from error


def largest(splits: Iterable[Iterator[bytes]]) -> int:
    """Returns the largest number of some splits."""
    return max(int(np.frombuffer(x, STORED).max()) for split in splits for x in split)


def read_numbers(path: Path, dtype: str) -> Iterator[bytes]:
    """Yields the numbers of a file as bytes of dtype STORED.

    The file is a .npy or a .bin of `dtype` in little-endian order. Raises UserError if
    it contains anything but whole numbers from 0 to 2^31 - 1.
    """
    array = _open(path, dtype)
    return _blocks([(str(path), array)], 0, len(array))


def _open(path: Path, dtype: str) -> np.ndarray:
    """Returns the array of a file, which is memory-mapped."""
    try:
        with reading(path):
            if path.suffix == ".bin":
                return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
            array = np.lib.format.open_memmap(path, mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it has the shape {array.shape} of {array.dtype}")
    except (ValueError, TypeError, EOFError) as error:
        raise UserError(
            f"{path} is not one sequence of integers in a .npy file, or in a .bin of "
            f"data.dtype={dtype!r} ({error}): write it with numpy.save, or set "
            "data.dtype"
        ) from error
    return array


def _blocks(
    arrays: list[tuple[str, np.ndarray]], start: int, stop: int
) -> Iterator[bytes]:
    """Yields the numbers [start, stop) of concatenated, named arrays."""
    first = 0
    for name, array in arrays:
        end = min(stop - first, len(array))
        for low in range(max(start - first, 0), end, BLOCK_NUMBERS):
            numbers = np.asarray(array[low : min(low + BLOCK_NUMBERS, end)])
            if not 0 <= numbers.min() <= numbers.max() < 2**31:
                raise UserError(
                    f"{name} has numbers from {numbers.min()} to {numbers.max()}, "
                    "outside 0 to 2147483647: shift or quantise them, and "
                    "check data.dtype"
                )
            yield numbers.astype(STORED).tobytes()
        first += len(array)


def open_numbers(
    path: str, document_end: str, dtype: str
) -> Callable[[str], Iterator[bytes]]:
    """Returns a function that reads a split of the user's files.

    Names of files state the splits, or the numbers are cut 90/5/5. document_end is a
    number here; see DataConfig.
    """
    end = ("data.document_end", parse_numbers(document_end, "data.document_end"))
    paths = files.corpus_files(path)
    names = files.named_splits(path, paths) or [""] * len(paths)
    arrays: dict[str, list[tuple[str, np.ndarray]]] = {}
    for file, name in zip(paths, names, strict=True):
        arrays.setdefault(name, []).extend([(str(file), _open(file, dtype)), end])

    def numbers(split: str) -> Iterator[bytes]:
        named = arrays.get(split) or arrays[""]
        total = sum(len(array) for _, array in named)
        if split in arrays:
            return _blocks(named, 0, total)
        at = SPLITS.index(split)
        start, stop = (total * n // 100 for n in (0, 90, 95, 100)[at : at + 2])
        return _blocks(named, start, stop)

    return numbers
