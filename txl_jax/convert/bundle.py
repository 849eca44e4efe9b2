"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

`<prefix>.index` is a table of protocol buffers that locate each variable in a data file
`<prefix>.data-00000-of-0000N`. All checksums are verified.
"""

import math
import re
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes  # noqa: F401, it adds bfloat16 to NumPy
import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

from txl_jax.errors import UserError
from txl_jax.report.checksum import DAMAGE

# By TensorFlow's enumeration values.
DTYPES = {1: "float32", 3: "int32", 9: "int64", 14: "bfloat16", 19: "float16"}
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER = 48  # bytes: two locations, padded to 40, and the magic number
TRAILER = 5  # bytes after a block: its compression and its checksum
FIX = "copy the checkpoint again"


def find(source: str | Path) -> Path:
    """Returns the prefix of a checkpoint.

    `source` is the prefix, its .index, or a folder whose file `checkpoint` names the
    latest one.
    """
    prefix = Path(str(source).removesuffix(".index"))
    prefixes = [prefix]
    if (state := prefix / "checkpoint").is_file():
        text = state.read_text("utf-8", "replace")
        names = re.findall(r'^\s*model_checkpoint_path:\s*"([^"\\]+)"', text, re.M)
        # It may name a folder that has been moved.
        prefixes += [prefix / x for name in names for x in (name, Path(name).name)]
    for prefix in prefixes:
        if Path(f"{prefix}.index").is_file():
            return prefix
    raise UserError(
        f"no file '{prefix}.index': give the prefix of a checkpoint's files, such as "
        "model/ckpt-0, or a folder whose file 'checkpoint' names it"
    )


def read(source: str | Path, omit: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Returns the variables by name, without those whose names end as in `omit`."""
    prefix = find(source)
    path = Path(f"{prefix}.index")
    try:
        records = _read_table(path.read_bytes())
        shards = _fields(records.pop(b"", b"")).get(1, 0)
        # Keys that begin with 0 are slices of another variable.
        variables = {k.decode("utf-8"): x for k, x in records.items() if k[0]}
        return {
            name: _read(prefix, shards, name, _fields(record))
            for name, record in variables.items()
            if not name.endswith(omit)
        }
    except (*DAMAGE, DecodeError) as error:
        raise UserError(
            f"{path} is not the index of a checkpoint, or is damaged: {error}; {FIX}"
        ) from error


def _fields(record: bytes) -> dict[int, Any]:
    """Returns the fields of a protocol buffer by number, without those that are 0."""
    fields = UnknownFieldSet(Empty.FromString(record))
    return {field.field_number: field.data for field in fields}


def _read(prefix: Path, shards: int, name: str, fields: dict[int, Any]) -> np.ndarray:
    """Returns a variable by the fields of its BundleEntryProto; raises UserError."""
    kind, dims, shard, offset, size, checksum = (fields.get(n, 0) for n in range(1, 7))
    if kind not in DTYPES:
        raise UserError(
            f"{prefix}: {name} has TensorFlow's data type {kind}; supported are "
            f"{', '.join(DTYPES.values())}"
        )
    dtype = np.dtype(DTYPES[kind])
    shape = tuple(dim.size for dim in TensorShapeProto.FromString(dims or b"").dim)
    if size != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{prefix}: {name} has {size} bytes, which is not the size of {shape} "
            f"{dtype}: save it again"
        )
    path = Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}")
    try:
        if path.stat().st_size < offset + size:
            raise UserError(f"{path} is truncated within {name}; {FIX}")
        data = np.fromfile(path, np.uint8, size, offset=offset)
    except OSError as error:
        raise UserError(
            f"cannot read {str(path)!r} ({error.strerror}), which holds {name}: the "
            f"checkpoint has {shards} data files"
        ) from error
    if masked_crc32c(data) != checksum:
        raise UserError(f"{path} is damaged: {name} does not match its checksum; {FIX}")
    return data.view(dtype).reshape(shape)


def _read_table(data: bytes) -> dict[bytes, bytes]:
    """Returns LevelDB's table: blocks that an index locates, which a footer locates."""
    if len(data) < FOOTER or not data.endswith(MAGIC):
        raise ValueError("it has no table's footer")
    footer = BytesIO(data[-FOOTER:])
    for _ in range(2):  # skips the location of an index that is always empty
        _varint(footer)
    return {
        key: value
        for _, location in _entries(data, footer)
        for key, value in _entries(data, BytesIO(location))
    }


def _varint(stream: BytesIO) -> int:
    """Reads a number of at most 70 bits, 7 per byte, the lowest first."""
    value = shift = 0
    while shift < 70 and (byte := stream.read(1)):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return value
    raise ValueError("a variable-length number has no end")


def _entries(data: bytes, location: BytesIO) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of the block at a location.

    Keys omit the prefix that they share with the key before. The block ends with
    offsets for searching.
    """
    start = _varint(location)
    end = start + _varint(location)
    if end - start < 4 or end + TRAILER > len(data) - FOOTER:
        raise ValueError("a block is too short, or exceeds the file")
    (checksum,) = struct.unpack_from("<I", data, end + 1)
    if masked_crc32c(data[start : end + 1]) != checksum:
        raise ValueError(f"bytes {start} to {end} do not match their checksum")
    (offsets,) = struct.unpack_from("<I", data, end - 4)
    block, stop = BytesIO(data[start:end]), end - start - 4 * (offsets + 1)
    key = b""
    while block.tell() < stop:
        shared, unshared, size = (_varint(block) for _ in range(3))
        key = key[:shared] + block.read(unshared)
        yield key, block.read(size)


def masked_crc32c(data: np.ndarray | bytes) -> int:
    """Returns the CRC-32C as stored: rotated and offset, so that it can be nested."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
