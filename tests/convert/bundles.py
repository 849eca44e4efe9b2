"""Writes the index of a TensorFlow checkpoint byte by byte, as its documents describe.

Every record is a block. The files that TensorFlow itself has written have blocks of
several records, whose keys share prefixes.
"""

import struct

from txl_jax.convert.bundle import masked_crc32c

Records = list[tuple[bytes, bytes]]


def varint(value: int) -> bytes:
    """Returns a number in groups of 7 bits, the lowest first."""
    low, high = value % 128, value // 128
    return bytes([low + 128]) + varint(high) if high else bytes([low])


def block(records: Records) -> bytes:
    """Returns a table's block; it ends with the only offset for searching, 0."""
    entries = [b"\0" + varint(len(k)) + varint(len(v)) + k + v for k, v in records]
    return b"".join(entries) + struct.pack("<2I", 0, 1)


def table(records: Records) -> bytes:
    """Returns a table of records, in the order of the argument."""
    file = bytearray()

    def add(records: Records) -> bytes:
        """Appends a block; returns its location."""
        data = block(records)
        location = varint(len(file)) + varint(len(data))
        data += b"\0"  # not compressed
        file.extend(data + struct.pack("<I", masked_crc32c(data)))
        return location

    index = [(record[0], add([record])) for record in records]
    footer = add([]) + add(index)
    return bytes(file) + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protocol buffer: a number or bytes."""
    if isinstance(value, bytes):
        return varint(number * 8 + 2) + varint(len(value)) + value
    return varint(number * 8) + varint(value)
