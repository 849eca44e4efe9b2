"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

`<prefix>.index` is a table of protocol buffers that locate each variable in a data file
`<prefix>.data-00000-of-0000N`. All checksums are verified.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
)
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from txl_jax.convert import sstable
from txl_jax.errors import UserError

# Keys are TensorFlow's enumeration values.
DTYPES = {
    1: np.dtype(np.float32),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}
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
        records = sstable.read(path)
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
    if entry.size != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{prefix}: {name} has {entry.size} bytes, which is not the size of "
            f"{shape} {dtype}: save it again"
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
    if sstable.masked_crc32c(data) != entry.checksum:
        raise UserError(f"{path} is damaged: {name} does not match its checksum; {FIX}")
    return data.view(dtype).reshape(shape)
