"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

`<prefix>.index` is a table of protocol buffers that locate each variable in a data file
`<prefix>.data-00000-of-0000N`. All checksums are verified.
"""

import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

from txl_jax.errors import UserError

# Keys are TensorFlow's enumeration values.
DTYPES = {
    1: np.dtype(np.float32),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER = 48  # bytes: two locations, padded to 40, and the magic number
TRAILER = 5  # bytes after a block: its compression and its checksum
FIX = "copy the checkpoint again"

_Field = descriptor_pb2.FieldDescriptorProto


def _message(name: str, **types: Any) -> Any:
    """Returns the class of a protocol buffer whose fields are numbered from 1."""
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
    fields = file.message_type.add(name=name).field
    for number, (field, kind) in enumerate(types.items(), 1):
        fields.add(name=field, number=number, type=kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


# The first field of BundleHeaderProto, and those of BundleEntryProto.
Header = _message("Header", shards=_Field.TYPE_INT32)
Entry = _message(
    "Entry",
    kind=_Field.TYPE_INT32,
    shape=_Field.TYPE_BYTES,
    shard=_Field.TYPE_INT32,
    offset=_Field.TYPE_INT64,
    size=_Field.TYPE_INT64,
    checksum=_Field.TYPE_FIXED32,
)


def find(source: str | Path) -> Path:
    """Returns the prefix of a checkpoint.

    `source` is the prefix, its .index, or a folder whose file `checkpoint` names the
    latest one.
    """
    source = Path(source)
    if source.suffix == ".index":
        source = source.with_suffix("")
    if not _index(source).is_file() and source.is_dir():
        source = _latest(source)
    if not _index(source).is_file():
        raise UserError(
            f"no file {str(_index(source))!r}: give the folder of a checkpoint, or the "
            "prefix of its files, such as model/ckpt-0"
        )
    return source


def _index(prefix: Path) -> Path:
    return Path(f"{prefix}.index")


def _latest(folder: Path) -> Path:
    """Returns the prefix that a folder's file `checkpoint` names."""
    path = folder / "checkpoint"
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    match = re.search(r'^\s*model_checkpoint_path:\s*"([^"\\]+)"', text, re.MULTILINE)
    if not match:
        raise UserError(
            f"{path} is missing or names no checkpoint: give the prefix of the "
            f"checkpoint's files, such as {folder / 'ckpt-0'}"
        )
    prefix = folder / match[1]
    # The file may name a folder that has been moved.
    return prefix if _index(prefix).is_file() else folder / prefix.name


def read(
    source: str | Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Returns the wanted variables of the checkpoint that `find` finds, by name."""
    prefix = find(source)
    path = _index(prefix)
    try:
        records = _read_table(path)
        header = Header.FromString(records.pop(b"", b""))
        # Keys that begin with 0 are slices of another variable.
        variables = {k.decode("utf-8"): x for k, x in records.items() if k[0]}
        return {
            name: _read(prefix, header.shards, name, Entry.FromString(record))
            for name, record in variables.items()
            if wanted(name)
        }
    except (ValueError, message.DecodeError) as error:
        raise UserError(
            f"{path} is not the index of a checkpoint, or is damaged: {error}; {FIX}"
        ) from error


def _read(prefix: Path, shards: int, name: str, entry: Any) -> np.ndarray:
    """Returns the values of a variable; raises UserError if they are damaged."""
    if entry.kind not in DTYPES:
        known = ", ".join(map(str, DTYPES.values()))
        raise UserError(
            f"{prefix}: {name} has TensorFlow's data type {entry.kind}; supported are "
            f"{known}"
        )
    dtype = DTYPES[entry.kind]
    shape = tuple(dim.size for dim in TensorShapeProto.FromString(entry.shape).dim)
    if len(shape) > 32 or entry.size != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{prefix}: {name} has {entry.size} bytes, which is not the size of "
            f"{shape[:32]} {dtype}: save it again"
        )
    path = Path(f"{prefix}.data-{entry.shard:05d}-of-{shards:05d}")
    try:
        if path.stat().st_size < entry.offset + entry.size:
            raise UserError(f"{path} is truncated within {name}; {FIX}")
        data = np.fromfile(path, np.uint8, entry.size, offset=entry.offset)
    except OSError as error:
        raise UserError(
            f"cannot read {str(path)!r} ({error.strerror}), which holds {name}: the "
            f"checkpoint has {shards} data files"
        ) from error
    if masked_crc32c(data) != entry.checksum:
        raise UserError(f"{path} is damaged: {name} does not match its checksum; {FIX}")
    return data.view(dtype).reshape(shape)


def _read_table(path: Path) -> dict[bytes, bytes]:
    """Returns LevelDB's table in a file; raises ValueError if it is damaged.

    A file consists of blocks and a footer. The footer locates the index, a block whose
    values locate the other blocks. Keys in a block omit the prefix that they share with
    the key before.
    """
    data = path.read_bytes()
    footer = data[-FOOTER:]
    if len(data) < FOOTER or not footer.endswith(MAGIC):
        raise ValueError("it has no table's footer")
    at = 0
    for _ in range(2):  # skips the location of an index that is always empty
        _, at = _varint(footer, at)
    table: dict[bytes, bytes] = {}
    for _, location in _entries(_block(data, footer[at:])):
        table |= _entries(_block(data, location))
    return table


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, 7 bits per byte, and the offset after it."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError("a variable-length number has no end")


def _block(data: bytes, location: bytes) -> bytes:
    start, at = _varint(location, 0)
    size, _ = _varint(location, at)
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
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        size, at = _varint(block, at)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + size]
        at += size


def masked_crc32c(data: np.ndarray | bytes) -> int:
    """Returns the CRC-32C as stored: rotated and offset, so that it can be nested."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
