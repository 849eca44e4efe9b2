"""LevelDB's sorted string tables, as TensorFlow writes them, and their CRC-32C.

A file consists of blocks and a footer. The footer locates the index, a block whose
values locate the other blocks. Keys in a block omit the prefix that they share with
the key before. The checksum is computed in numpy, at about 0.5 GB/s.
"""

import functools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAGIC = 0xDB4775248B80FB57
FOOTER = 48  # bytes: two locations, padded to 40, and the magic number
TRAILER = 5  # bytes after a block: its compression and its checksum

POLYNOMIAL = 0x82F63B78  # of CRC-32C, bit-reversed
SEED = 0x641F6454  # the word that takes a register from all zeros to all ones
WIDEST = 16  # folds have at most 2^16 words: 256 KiB, which fit the cache


def read(path: Path) -> dict[bytes, bytes]:
    """Returns the table in a file; raises ValueError if it is damaged."""
    if not is_table(path):
        raise ValueError("it has no table's footer")
    data = path.read_bytes()
    footer = data[-FOOTER:]
    at = 0
    for _ in range(2):  # skips the location of an index that is always empty
        _, at = varint(footer, at)
    table: dict[bytes, bytes] = {}
    last = None
    for _, location in _entries(_block(data, footer[at:])):
        for key, value in _entries(_block(data, location)):
            if last is not None and key <= last:
                raise ValueError(f"key {key[:80]!r} is duplicate or out of order")
            table[key] = value
            last = key
    return table


def is_table(path: Path) -> bool:
    """Returns whether a file has a table's footer."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        return size >= FOOTER and file.read() == struct.pack("<Q", MAGIC)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, 7 bits per byte, and the offset after it."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError("a variable-length number has no end")


def _block(data: bytes, location: bytes) -> bytes:
    start, at = varint(location, 0)
    size, _ = varint(location, at)
    end = start + size
    if end + TRAILER > len(data) - FOOTER:
        raise ValueError("a block exceeds the file")
    (checksum,) = struct.unpack_from("<I", data, end + 1)
    if masked_crc32c(data[start : end + 1]) != checksum:
        raise ValueError(f"bytes {start} to {end} do not match their checksum")
    if data[end]:
        raise ValueError(
            "its blocks are compressed, which TensorFlow's Saver never does"
        )
    return data[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block, which ends with offsets for searching."""
    if len(block) < 4:
        raise ValueError("a block is too short")
    (offsets,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (offsets + 1)
    key, at = b"", 0
    while at < end:
        shared, at = varint(block, at)
        unshared, at = varint(block, at)
        size, at = varint(block, at)
        if shared > len(key) or at + unshared + size > end:
            raise ValueError("an entry exceeds its block")
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + size]
        at += size
    if at != end:
        raise ValueError("the entries do not fill their block")


def crc32c(data: np.ndarray | bytes) -> int:
    """Returns the CRC-32C of bytes.

    The register is linear in the message: the sum of all words, each advanced over the
    words that follow it. A message can therefore be folded: the first half of its
    words, advanced over the second half, is added to the second half.
    """
    data = np.frombuffer(data, np.uint8)
    k = min(WIDEST, (len(data) // 4).bit_length())
    size = 4 << k
    # Zeros before the seed do not change the register.
    rest = len(data) % size
    zeros = np.zeros(-(rest + 4) % size, np.uint8)
    seed = np.array([SEED], "<u4").view(np.uint8)
    words = np.zeros(1 << k, np.uint32)
    for part in (np.concatenate([zeros, seed, data[:rest]]), data[rest:]):
        for row in part.view("<u4").reshape(-1, 1 << k):
            words = _advance(words, k) ^ row
    for half in reversed(range(k)):
        words = _advance(words[: 1 << half], half) ^ words[1 << half :]
    return int(_advance(words, 0)[0]) ^ 0xFFFFFFFF


def masked_crc32c(data: np.ndarray | bytes) -> int:
    """Returns the checksum as stored: rotated and offset, so that it can be nested."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _advance(words: np.ndarray, k: int) -> np.ndarray:
    """Returns each register after 2^k more words of zeros."""
    low, high = _tables(k)
    halves = words.view(np.uint16).reshape(-1, 2)
    return low.take(halves[:, 0]) ^ high.take(halves[:, 1])


@functools.cache
def _tables(k: int) -> np.ndarray:
    """Tabulates `_advance` for every lower and every upper half of a register."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if k:
        bits = _advance(_advance(bits, k - 1), k - 1)
    else:
        for _ in range(32):
            bits = np.where(bits & 1, bits >> 1 ^ np.uint32(POLYNOMIAL), bits >> 1)
    tables = np.zeros((2, 1 << 16), np.uint32)
    for bit, register in enumerate(bits):
        half, low = divmod(bit, 16)
        tables[half, 1 << low : 2 << low] = tables[half, : 1 << low] ^ register
    return tables
