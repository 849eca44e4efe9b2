"""LevelDB's sorted string tables, as TensorFlow writes them, and their CRC-32C.

A file consists of blocks and a footer. The footer locates the index, a block whose
values locate the other blocks. Keys in a block omit the prefix that they share with
the key before.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER = 48  # bytes: two locations, padded to 40, and the magic number
TRAILER = 5  # bytes after a block: its compression and its checksum


def read(path: Path) -> dict[bytes, bytes]:
    """Returns the table in a file; raises ValueError if it is damaged."""
    data = path.read_bytes()
    footer = data[-FOOTER:]
    if len(data) < FOOTER or not footer.endswith(MAGIC):
        raise ValueError("it has no table's footer")
    at = 0
    for _ in range(2):  # skips the location of an index that is always empty
        _, at = varint(footer, at)
    table: dict[bytes, bytes] = {}
    for _, location in _entries(_block(data, footer[at:])):
        table |= _entries(_block(data, location))
    return table


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
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + size]
        at += size


def masked_crc32c(data: np.ndarray | bytes) -> int:
    """Returns the CRC-32C as stored: rotated and offset, so that it can be nested."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
