"""Writes TensorFlow's checkpoints byte by byte, as its documents describe them.

Every record is a block. Blocks of several records, whose keys share prefixes, and the
values of checksums are in the files that TensorFlow itself has written.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_jax.convert.bundle import masked_crc32c

Records = list[tuple[bytes, bytes]]

KINDS = {"float32": 1, "int32": 3, "int64": 9, "bfloat16": 14}


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


def entry(value: Any, shard: int = 0, offset: int = 0) -> bytes:
    """Returns the record of a variable."""
    sizes = b"".join(field(2, field(1, size)) for size in value.shape)
    record = field(1, KINDS[value.dtype.name]) + field(2, sizes)
    record += field(3, shard) + field(4, offset) + field(5, value.nbytes)
    checksum = struct.pack("<I", masked_crc32c(value.tobytes()))
    return record + varint(6 * 8 + 5) + checksum


def write(prefix: Path, variables: Mapping[str, Any], shards: int) -> None:
    """Writes a checkpoint, and its folder's `checkpoint`."""
    data = [b""] * shards
    records = [(b"", field(1, shards) + field(3, field(1, 1)))]
    for i, (name, value) in enumerate(sorted(variables.items())):
        shard = i % shards
        records.append((name.encode(), entry(value, shard, len(data[shard]))))
        data[shard] += value.tobytes()
    for i, part in enumerate(data):
        Path(f"{prefix}.data-{i:05d}-of-{shards:05d}").write_bytes(part)
    Path(f"{prefix}.index").write_bytes(table(records))
    text = f'model_checkpoint_path: "{prefix.name}"\n'
    (prefix.parent / "checkpoint").write_text(text, "utf-8")
