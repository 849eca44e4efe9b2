"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

`<prefix>.index` is a table of protocol buffers that locate each variable in a data file
`<prefix>.data-00000-of-0000N`. All checksums are verified.
"""

import glob
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

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


@dataclass(frozen=True)
class Variable:
    """A variable of a checkpoint; `read` returns its values."""

    name: str
    prefix: Path
    shards: int
    kind: int  # TensorFlow's enumeration value of the dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    sliced: bool  # stored in parts, under other names

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def read(self) -> np.ndarray:
        """Returns the values; raises UserError if they are unsupported or damaged."""
        name = f"{self.prefix}: {self.name}"
        if self.kind not in DTYPES:
            known = ", ".join(map(str, DTYPES.values()))
            raise UserError(
                f"{name} has TensorFlow's data type {self.kind}; supported are {known}"
            )
        if self.sliced:
            raise UserError(
                f"{name} is stored in slices: restore it in TensorFlow and save it "
                "from a graph without a partitioner"
            )
        dtype = DTYPES[self.kind]
        if self.size != math.prod(self.shape) * dtype.itemsize:
            raise UserError(
                f"{name} has {self.size} bytes, which is not the size of {self.shape} "
                f"{dtype}: save it again"
            )
        path = Path(f"{self.prefix}.data-{self.shard:05d}-of-{self.shards:05d}")
        try:
            if path.stat().st_size < self.offset + self.size:
                raise UserError(f"{path} is truncated within {self.name}; {FIX}")
            data = np.fromfile(path, np.uint8, self.size, offset=self.offset)
        except OSError as error:
            raise UserError(
                f"cannot read {str(path)!r} ({error.strerror}), which holds "
                f"{self.name}: the checkpoint has {self.shards} data files"
            ) from error
        if sstable.masked_crc32c(data) != self.checksum:
            raise UserError(
                f"{path} is damaged: {self.name} does not match its checksum; {FIX}"
            )
        return data.view(dtype).reshape(self.shape)


def find(source: str | Path) -> Path:
    """Returns the prefix of a checkpoint.

    `source` is the prefix, its .index, or a folder whose file `checkpoint` names the
    latest one. Raises UserError if there is no such checkpoint.
    """
    source = Path(source)
    if source.suffix == ".index":
        source = source.with_suffix("")
    if not _index(source).is_file() and source.is_dir():
        source = _latest(source)
    if _index(source).is_file():
        return source
    old_shards = source.parent.glob(f"{glob.escape(source.name)}-?????-of-?????")
    for old in (source, *old_shards):
        if old.is_file() and sstable.is_table(old):
            raise UserError(
                f"{old} is a checkpoint in TensorFlow's first format: restore it in "
                "TensorFlow 1 and save it with tf.train.Saver, which writes the second"
            )
    raise UserError(
        f"no file {str(_index(source))!r}: give the folder of a checkpoint, or the "
        "prefix of its files, such as model/ckpt-0"
    )


def _index(prefix: Path) -> Path:
    return Path(f"{prefix}.index")


def _latest(folder: Path) -> Path:
    """Returns the prefix that a folder's file `checkpoint` names."""
    path = folder / "checkpoint"
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        text = ""
    match = re.search(r'^\s*model_checkpoint_path:\s*"([^"\\]+)"', text, re.MULTILINE)
    if not match:
        raise UserError(
            f"{path} is missing or names no checkpoint: give the prefix of the "
            f"checkpoint's files, such as {folder / 'ckpt-0'}"
        )
    prefix = folder / match[1]
    # The file may name a folder that has been moved.
    return prefix if _index(prefix).is_file() else folder / prefix.name


def read(source: str | Path) -> dict[str, Variable]:
    """Returns the variables of the checkpoint that `find` finds, by name.

    Raises UserError if the checkpoint is missing or its index is damaged.
    """
    prefix = find(source)
    path = _index(prefix)
    try:
        records = sstable.read(path)
        shards = _shards(records.pop(b"", b""))
        return {
            (name := key.decode("utf-8")): Variable(
                name, prefix, shards, *_entry(record, shards)
            )
            for key, record in records.items()
            if not key.startswith(b"\0")  # a slice of another variable
        }
    except ValueError as error:
        raise UserError(
            f"{path} is not the index of a checkpoint, or is damaged: {error}; {FIX}"
        ) from error


# The records are protocol buffers: numbered fields, each once unless it is a list.


def _fields(record: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field."""
    at = 0
    while at < len(record):
        tag, at = sstable.varint(record, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = sstable.varint(record, at)
            yield number, value
            continue
        if kind == 2:
            size, at = sstable.varint(record, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a record has a field of kind {kind}")
        if at + size > len(record):
            raise ValueError("a field exceeds its record")
        data = record[at : at + size]
        yield number, data if kind == 2 else int.from_bytes(data, "little")
        at += size


def _shards(record: bytes) -> int:
    """Returns the number of data files."""
    fields = dict(_fields(record))
    shards = fields.get(1)
    if not isinstance(shards, int) or not shards:
        raise ValueError("the number of data files is missing")
    if fields.get(2, 0):
        raise ValueError("its numbers are big-endian")
    return shards


def _entry(record: bytes, shards: int) -> tuple[Any, ...]:
    """Returns the fields of a Variable from `kind` on."""
    numbers = dict.fromkeys((1, 3, 4, 5, 6), 0)
    shape: tuple[int, ...] = ()
    sliced = False
    for number, value in _fields(record):
        if number in numbers and isinstance(value, int):
            numbers[number] = value
        elif number == 2 and isinstance(value, bytes):
            shape = tuple(_sizes(value))
        elif number == 7:
            sliced = True
        else:
            raise ValueError(f"a record has the unknown field {number}")
    kind, shard, offset, size, checksum = numbers.values()
    if shard >= shards:
        raise ValueError(f"a variable is in data file {shard} of {shards}")
    return kind, shape, shard, offset, size, checksum, sliced


def _sizes(record: bytes) -> Iterator[int]:
    """Yields the sizes of a shape's dimensions."""
    for number, value in _fields(record):
        size = dict(_fields(value)).get(1, 0) if isinstance(value, bytes) else b""
        if number != 2 or not isinstance(size, int):
            raise ValueError("a variable has an unknown shape")
        yield size
