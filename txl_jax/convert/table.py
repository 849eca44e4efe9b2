"""Sorted tables of keys and values, LevelDB's files, as TensorFlow writes them.

A file is blocks and a footer, which says where the index is: a block whose values say
where the others are. A key in a block gives only what differs from the key before it.

Dims: none.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from txl_jax.convert import crc32c

MAGIC = 0xDB4775248B80FB57
FOOTER = 48  # two places in at most 40 bytes, and the magic
TRAILER = 5  # a block's compression, one byte, and its checksum


def read(path: Path) -> dict[bytes, bytes]:
    """Returns the table in a file; raises ValueError if it is damaged."""
    if not is_table(path):
        raise ValueError("it does not end as a table does")
    data = path.read_bytes()
    footer = data[-FOOTER:]
    at = 0
    for _ in range(2):  # the place of another index, which is empty
        _, at = varint(footer, at)
    index = _block(data, footer[at:])
    table: dict[bytes, bytes] = {}
    last = None
    for _, place in _entries(index):
        for key, value in _entries(_block(data, place)):
            if last is not None and key <= last:
                raise ValueError(f"key {key[:80]!r} is there twice or out of order")
            table[key] = value
            last = key
    return table


def is_table(path: Path) -> bool:
    """Returns whether a file ends as a table does."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        return size >= FOOTER and file.read() == struct.pack("<Q", MAGIC)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at a byte, 7 bits per byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number in it does not end")


def _block(data: bytes, place: bytes) -> bytes:
    """Returns the block at a place: its first byte and its size."""
    start, at = varint(place, 0)
    size, _ = varint(place, at)
    end = start + size
    if end + TRAILER > len(data) - FOOTER:
        raise ValueError("a block leaves it")
    (checksum,) = struct.unpack_from("<I", data, end + 1)
    if crc32c.masked(data[start : end + 1]) != checksum:
        raise ValueError(f"the checksum of its bytes {start} to {end} is wrong")
    if data[end]:
        raise ValueError(
            "its blocks are compressed, as no Saver of TensorFlow writes them"
        )
    return data[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block; places for a search end it."""
    if len(block) < 4:
        raise ValueError("a block in it is too short")
    (places,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (places + 1)
    key, at = b"", 0
    while at < end:
        shared, at = varint(block, at)
        fresh, at = varint(block, at)
        size, at = varint(block, at)
        if shared > len(key) or at + fresh + size > end:
            raise ValueError("an entry leaves its block")
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + size]
        at += size
    if at != end:
        raise ValueError("the entries of a block do not fill it")
