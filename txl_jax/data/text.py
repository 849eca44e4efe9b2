"""Text from blocks of bytes, cut where a vocabulary allows it, in bounded memory."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from txl_jax.errors import UserError
from txl_jax.runtime.storage import Json

UNKNOWN = ("<unk>", "<UNK>")  # in WikiText and in One Billion Word

LINE_BYTES = 1 << 20  # a longer line is cut at the last space before this

CONTINUATIONS = bytes(range(0x80, 0xC0))  # bytes of a character after its first
_SPACE = np.zeros(256, bool)
_SPACE[list(b" \t\n\r\v\f")] = True


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the narrowest of uint8, uint16 and int32 that holds every token."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def missing(symbol: str) -> UserError:
    """Returns the error for a word, character or byte without a token."""
    return UserError(
        f"{symbol} is not in the vocabulary, which has no {UNKNOWN[0]}: leave it out, "
        "or train with another vocabulary (data.vocab='byte' encodes any text)"
    )


class NotUTF8(UserError):
    """Text that is not UTF-8, with the offset of the wrong byte."""

    def __init__(self, name: str, offset: int) -> None:
        super().__init__(
            f"{name} is not UTF-8 at byte {offset}: convert it to UTF-8, or set "
            "data.vocab='byte', which takes any bytes"
        )
        self.name, self.offset = name, offset


@dataclass
class Meter:
    """Counts the bytes, words and lines of a split, the denominators of metrics.

    Words are runs of bytes other than ASCII white space. The last line counts even
    without a newline.
    """

    original_bytes: int = 0
    stream_bytes: int = 0  # without dropped newlines
    words: int = 0
    lines: int = 0

    def counts(self) -> Json:
        """Returns the entries of a split in the manifest."""
        return {
            "bytes": self.stream_bytes,
            "original_bytes": self.original_bytes,
            "words": self.words,
            "lines": self.lines,
        }

    def measure(
        self, blocks: Iterable[bytes], drop_newlines: bool = False
    ) -> Iterator[bytes]:
        """Yields the blocks, without byte 10 if `drop_newlines`."""
        after_space = True
        block = b""
        for block in blocks:
            if not block:
                continue
            space = _SPACE[np.frombuffer(block, np.uint8)]
            before = np.concatenate(([after_space], space[:-1]))
            self.words += int(np.count_nonzero(before & ~space))
            after_space = bool(space[-1])
            self.lines += block.count(b"\n")
            self.original_bytes += len(block)
            read = block.replace(b"\n", b"") if drop_newlines else block
            self.stream_bytes += len(read)
            yield read
        if block and not block.endswith(b"\n"):
            self.lines += 1


def characters(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields text cut between characters; `name` is the split's name in errors."""
    return _cut(blocks, name, _last_character)


def words(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields text cut after white space."""

    def after_space(data: bytes) -> int:
        return max(data.rfind(b"\n"), data.rfind(b" "), data.rfind(b"\t")) + 1

    return _cut(blocks, name, after_space)


def lines(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields text cut after lines, and inside lines of more than LINE_BYTES."""

    def after_line(data: bytes) -> int:
        stop = data.rfind(b"\n") + 1
        if not stop and len(data) >= LINE_BYTES:
            # In most tokenizers, a space belongs to the word after it.
            stop = data.rfind(b" ", 1, LINE_BYTES)
            return stop if stop > 0 else _last_character(data)
        return stop

    return _cut(blocks, name, after_line)


def _last_character(data: bytes) -> int:
    """Returns the start of the last character if the next block may continue it."""
    start = len(data.rstrip(CONTINUATIONS)) - 1
    return start if start >= 0 and data[start] >= 0xC0 else len(data)


def _cut(
    blocks: Iterable[bytes], name: str, where: Callable[[bytes], int]
) -> Iterator[str]:
    data, start = b"", 0
    for block in itertools.chain(blocks, [None]):
        data += block or b""
        stop = len(data) if block is None else where(data)
        try:
            text = data[:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotUTF8(name, start + error.start) from None
        if text:
            yield text
        data, start = data[stop:], start + stop
