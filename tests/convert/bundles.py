"""Writes TensorFlow's checkpoints byte by byte, as its documents describe them.

It shares no code with the reader. Blocks are small, so that a few variables fill many.
"""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Records = list[tuple[bytes, bytes]]

KINDS = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bfloat16": 14}
BLOCK = 200  # bytes after which a block ends
RESTART = 4  # every fourth key is written whole


def crc32c(data: bytes) -> int:
    """Returns the checksum of bytes, bit by bit."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Returns the checksum as it is stored."""
    crc = crc32c(data)
    turned = (crc >> 15) | (crc & 0x7FFF) << 17
    return (turned + 0xA282EAD8) % 2**32


def varint(value: int) -> bytes:
    """Returns a number in groups of 7 bits, the lowest first."""
    low, high = value % 128, value // 128
    return bytes([low + 128]) + varint(high) if high else bytes([low])


def block(records: Records) -> bytes:
    """Returns a table's block."""
    data, places, before = b"", [], b""
    for i, (key, value) in enumerate(records):
        shared = 0
        if i % RESTART:
            while key[: shared + 1] == before[: shared + 1] and shared < len(key):
                shared += 1
        else:
            places.append(len(data))
        fresh = key[shared:]
        data += varint(shared) + varint(len(fresh)) + varint(len(value))
        data += fresh + value
        before = key
    places = places or [0]
    return data + struct.pack(f"<{len(places) + 1}I", *places, len(places))


def table(records: Records, block: Callable[[Records], bytes] = block) -> bytes:
    """Returns a table of records, in the order of the argument."""
    file = b""

    def add(records: Records) -> bytes:
        """Appends a block; returns its location."""
        nonlocal file
        data = block(records)
        place = varint(len(file)) + varint(len(data))
        data += b"\0"  # not compressed
        file += data + struct.pack("<I", masked(data))
        return place

    index, group = [], []
    for i, record in enumerate(records):
        group.append(record)
        if sum(len(k) + len(v) for k, v in group) > BLOCK or i == len(records) - 1:
            index.append((record[0], add(group)))
            group = []
    footer = add([]) + add(index)
    return file + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protocol buffer: a number or bytes."""
    if isinstance(value, bytes):
        return varint(number * 8 + 2) + varint(len(value)) + value
    return varint(number * 8) + varint(value)


def entry(value: Any, kind: int, shard: int, offset: int) -> bytes:
    """Returns the record of a variable."""
    sizes = b"".join(field(2, field(1, size)) for size in value.shape)
    record = field(1, kind) + field(2, sizes) + field(3, shard) + field(4, offset)
    checksum = struct.pack("<I", masked(value.tobytes()))
    return record + field(5, value.nbytes) + varint(6 * 8 + 5) + checksum


def write(prefix: Path, variables: Mapping[str, Any], shards: int = 1) -> Records:
    """Writes a checkpoint, and its folder's `checkpoint`; returns the index."""
    data = [b""] * shards
    records = [(b"", field(1, shards) + field(3, field(1, 1)))]
    for i, (name, value) in enumerate(sorted(variables.items())):
        value = np.asarray(value)
        shard = i % shards
        kind = KINDS[value.dtype.name]
        records.append((name.encode(), entry(value, kind, shard, len(data[shard]))))
        data[shard] += value.tobytes()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(data):
        Path(f"{prefix}.data-{i:05d}-of-{shards:05d}").write_bytes(part)
    Path(f"{prefix}.index").write_bytes(table(records))
    text = f'model_checkpoint_path: "{prefix.name}"\n'
    (prefix.parent / "checkpoint").write_text(text, "utf-8")
    return records
