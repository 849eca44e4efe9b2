"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

`<prefix>.index` is a table of what each variable is and where its numbers lie, in
`<prefix>.data-00000-of-0000N`. Both are protected by checksums, which are held.

Dims: none.
"""

import glob
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from txl_jax.convert import crc32c, table
from txl_jax.errors import UserError

# By TensorFlow's numbers.
DTYPES = {
    1: np.dtype(np.float32),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}
AGAIN = "copy the checkpoint again"


@dataclass(frozen=True)
class Entry:
    """What a variable is, and where its bytes lie."""

    kind: int  # TensorFlow's number of its dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    sliced: bool  # its numbers are under other names


@dataclass(frozen=True)
class Bundle:
    """A checkpoint: its variables by name, whose numbers are read when asked for."""

    prefix: Path
    shards: int
    entries: dict[str, Entry]

    def read(self, name: str) -> np.ndarray:
        """Returns the numbers of a variable.

        Raises UserError if they are of a dtype that is not in DTYPES, stored in
        slices, missing or damaged.
        """
        entry = self.entries[name]
        if entry.kind not in DTYPES:
            known = ", ".join(map(str, DTYPES.values()))
            raise UserError(
                f"{self.prefix}: {name} has TensorFlow's data type {entry.kind}; only "
                f"{known} can be read"
            )
        if entry.sliced:
            raise UserError(
                f"{self.prefix}: {name} is stored in slices: restore it in TensorFlow "
                "and save it from a graph without a partitioner"
            )
        dtype = DTYPES[entry.kind]
        path = self._shard(entry.shard)
        try:
            with path.open("rb") as file:
                there = file.seek(0, 2) - entry.offset
                if there < entry.size:
                    raise UserError(
                        f"{path} is cut: it ends before the numbers of {name}; {AGAIN}"
                    )
                file.seek(entry.offset)
                data = np.fromfile(file, np.uint8, entry.size)
        except OSError as error:
            raise UserError(
                f"cannot read {str(path)!r} ({error.strerror}), which holds {name}: "
                f"the checkpoint has {self.shards} data files beside its index"
            ) from error
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise UserError(
                f"{self.prefix}: {name} has {entry.size} bytes, not those of "
                f"{entry.shape} {dtype}: save it again"
            )
        if crc32c.masked(data) != entry.checksum:
            raise UserError(
                f"{path} is damaged: the checksum of {name} is wrong; {AGAIN}"
            )
        return data.view(dtype).reshape(entry.shape)

    def _shard(self, i: int) -> Path:
        return Path(f"{self.prefix}.data-{i:05d}-of-{self.shards:05d}")


def find(source: str | Path) -> Path:
    """Returns the prefix of a checkpoint.

    `source` is that, its .index, or a folder whose file `checkpoint` names the latest.
    Raises UserError if no such checkpoint is there.
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
        if old.is_file() and table.is_table(old):
            raise UserError(
                f"{old} is a checkpoint in TensorFlow's first format: restore it in "
                "TensorFlow 1 and save it with tf.train.Saver, which writes the second"
            )
    raise UserError(
        f"no file {str(_index(source))!r}: give a checkpoint as the folder that holds "
        "it, or as what its files' names begin with, such as model/ckpt-0"
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
    named = re.search(r'^\s*model_checkpoint_path:\s*"([^"\\]+)"', text, re.MULTILINE)
    if not named:
        raise UserError(
            f"{path} is missing or names no checkpoint: give what the names of the "
            f"checkpoint's files begin with, such as {folder / 'ckpt-0'}"
        )
    prefix = folder / named[1]
    # It may be named by where it was written, not where it is now.
    return prefix if _index(prefix).is_file() else folder / prefix.name


def read(source: str | Path) -> Bundle:
    """Returns a checkpoint; `source` as `find` takes it.

    Raises UserError if it is missing or its index is damaged.
    """
    prefix = find(source)
    path = _index(prefix)
    try:
        records = table.read(path)
        shards = _header(records.pop(b"", b""))
        entries = {
            key.decode("utf-8"): _entry(record, shards)
            for key, record in records.items()
            if not key.startswith(b"\0")  # slices of others, which say so
        }
    except ValueError as error:
        raise UserError(
            f"{path} is no index of a checkpoint, or it is damaged: {error}; {AGAIN}"
        ) from error
    return Bundle(prefix, shards, entries)


# The records are protocol buffers: numbered fields, each once unless it is a list.


def _fields(record: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field."""
    at = 0
    while at < len(record):
        tag, at = table.varint(record, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = table.varint(record, at)
            yield number, value
            continue
        if kind == 2:
            size, at = table.varint(record, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a record in it has a field of kind {kind}")
        if at + size > len(record):
            raise ValueError("a field leaves its record")
        data = record[at : at + size]
        yield number, data if kind == 2 else int.from_bytes(data, "little")
        at += size


def _header(record: bytes) -> int:
    """Returns how many data files there are."""
    fields = dict(_fields(record))
    shards = fields.get(1)
    if not isinstance(shards, int) or not shards:
        raise ValueError("it does not say how many data files there are")
    if fields.get(2, 0):
        raise ValueError("its numbers are big-endian, which cannot be read")
    return shards


def _entry(record: bytes, shards: int) -> Entry:
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
            raise ValueError(f"a record in it has field {number}, which is unknown")
    kind, shard, offset, size, checksum = numbers.values()
    if shard >= shards:
        raise ValueError(f"it puts numbers into data file {shard} of {shards}")
    return Entry(kind, shape, shard, offset, size, checksum, sliced)


def _sizes(record: bytes) -> Iterator[int]:
    """Yields the sizes of a shape's dimensions."""
    for number, value in _fields(record):
        if number != 2 or not isinstance(value, bytes):
            raise ValueError("a shape in it is unknown")
        size = dict(_fields(value)).get(1, 0)
        if not isinstance(size, int):
            raise ValueError("a shape in it has no size")
        yield size
