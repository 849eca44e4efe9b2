"""Files that torch.save or pickle wrote, read without running anything they hold.

Three layouts: a zip archive (since PyTorch 1.6), the stream of pickles and raw storages
before it, and a bare pickle. Tensors stay in the file until they are asked for.
"""

import dataclasses
import math
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.convert.machine import DAMAGE, Global, Machine, Object
from txl_jax.errors import UserError

MAGIC = 0x1950A86A20F9469CFC6C  # the value of the first pickle in a stream
DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "<u1",
}


@dataclasses.dataclass
class Storage:
    """Numbers in a row, in a file."""

    path: Path
    kind: str
    count: int
    start: int = -1  # their first byte; -1 = not found

    @property
    def dtype(self) -> np.dtype:
        """The type of one number."""
        if self.kind not in DTYPES:
            raise ValueError(f"numbers of kind {self.kind} are unknown here")
        return np.dtype(DTYPES[self.kind])

    def open(self) -> np.ndarray:
        """Returns the numbers, mapped; raises ValueError if the file lacks any."""
        there = self.path.stat().st_size - self.start
        if self.start < 0 or self.count * self.dtype.itemsize > there:
            raise ValueError("its numbers are not all in the file, which may be cut")
        if not self.count:
            return np.zeros(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.start, (self.count,))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> np.ndarray:
        """Returns the view, mapped; raises ValueError if it leaves its storage."""
        numbers = self.storage.open()
        size = math.prod(self.shape)
        last = sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        if size > len(numbers) or (size and self.offset + last >= len(numbers)):
            raise ValueError(f"its shape {self.shape} is more than its storage holds")
        if self.storage.kind == "BFloat16Storage":  # the upper half of a float32
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        if not size:
            return np.zeros(self.shape, numbers.dtype)
        step = numbers.itemsize
        return np.lib.stride_tricks.as_strided(
            numbers[self.offset :],
            self.shape,
            [step * stride for stride in self.strides],
            writeable=False,
        )


def read(path: Path) -> Any:
    """Returns what a file holds: plain values, Tensors and inert Objects.

    Raises UserError for a file that is missing, damaged, cut or of no known layout.
    """
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source,
        ):
            return _read_stream(path, source)
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}") from None
    except (*DAMAGE, OSError, zipfile.BadZipFile, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{path} is no file of torch.save or pickle, or it is damaged: {reason}"
        ) from error


def arrays(value: Any, path: Path) -> dict[str, np.ndarray]:
    """Returns a state dict, or a whole pickled module's, as arrays by name.

    Arrays are mapped from the file; names that hold no tensor are left out.
    """
    flat: dict[str, Any] = {}
    if isinstance(value, Object):
        flat = _flatten(value)
    elif isinstance(value, Mapping):
        flat = {k: v for k, v in value.items() if isinstance(k, str)}
    found = {}
    for name, tensor in flat.items():
        if isinstance(tensor, Tensor):
            try:
                found[name] = tensor.open()
            except ValueError as error:
                raise UserError(f"{path}: {name[:80]}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no state dict and no module: no tensors in it")
    return found


def _flatten(module: Object) -> dict[str, Any]:
    """Returns a pickled module's parameters and buffers, and those of its parts."""
    flat: dict[str, Any] = {}
    left, seen = [("", module)], {id(module)}
    while left:
        prefix, part = left.pop()
        for kind in ("_parameters", "_buffers"):
            tensors = part.field(kind)
            if isinstance(tensors, dict):
                flat |= {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
        parts = part.field("_modules")
        for name, inner in parts.items() if isinstance(parts, dict) else ():
            if isinstance(inner, Object) and id(inner) not in seen:
                seen.add(id(inner))
                left.append((f"{prefix}{name}.", inner))
    return flat


def _tensor(args: Any) -> Tensor:
    storage, offset, shape, strides = args[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or any(type(n) is not int for n in numbers):
        raise TypeError("a tensor in it has no storage or no shape")
    if min(numbers) < 0 or len(shape) != len(strides):
        raise ValueError("a tensor in it has a negative size or stride")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


MAKERS = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda args: args[0],
    "torch.Size": lambda args: args[0],
    "copyreg._reconstructor": lambda args: Object(args[0]),
    "copy_reg._reconstructor": lambda args: Object(args[0]),
}


class _Storages(dict[str, Storage]):
    """The storages that a file's persistent ids name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def find(self, identity: Any) -> Any:
        """Returns what a persistent id of torch.save means."""
        if not isinstance(identity, tuple):
            raise TypeError("an id in it is not torch.save's")
        if identity[0] == "module":  # a class, beside its source
            return identity[1]
        _, kind, key, _, count, *view = identity
        if not (isinstance(kind, Global) and isinstance(key, str)):
            raise TypeError("a storage in it has no kind or no key")
        if type(count) is not int or count < 0 or any(view):
            raise ValueError("a storage in it has no size, or is a view of another")
        made = Storage(self.path, kind.name.rpartition(".")[2], count)
        kept = self.setdefault(key, made)
        if (kept.kind, kept.count) != (made.kind, made.count):
            raise ValueError(f"storage {key[:80]} in it has two sizes")
        return kept


def _read_stream(path: Path, source: mmap.mmap) -> Any:
    """Reads a bare pickle, or what torch.save wrote before its zip archives."""
    storages = _Storages(path)

    def next_pickle() -> Any:
        # mmap reads like a file, and never more than there is.
        return Machine(MAKERS, storages.find, len(source)).run(source)

    value = next_pickle()
    if value != MAGIC:
        return value
    next_pickle()  # the version of the protocol
    if next_pickle().get("little_endian") is not True:
        raise ValueError("its numbers are big-endian")
    value, keys = next_pickle(), next_pickle()
    for key in keys:
        storage = storages[key]
        (count,) = struct.unpack("<q", source.read(8))
        storage.start = source.tell()
        if count != storage.count:
            raise ValueError(f"storage {key} has {count} numbers, not {storage.count}")
        if storage.start + count * storage.dtype.itemsize > len(source):
            raise ValueError(f"storage {key} is cut: the file ends within it")
        source.seek(count * storage.dtype.itemsize, 1)
    return value


def _read_zip(path: Path) -> Any:
    storages = _Storages(path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (main,) = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
        folder = main.removesuffix("data.pkl")

        def find(name: str) -> tuple[int, int]:
            """Returns the first byte of an entry, and its size."""
            entry = entries[folder + name]
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename} in it is compressed or encrypted")
            file.seek(entry.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
            start = entry.header_offset + 30 + sum(lengths)
            if start + entry.file_size > path.stat().st_size:
                raise ValueError(f"{entry.filename} in it is cut")
            return start, entry.file_size

        def content(name: str) -> bytes:
            start, size = find(name)
            file.seek(start)
            return file.read(size)

        if folder + "byteorder" in entries and content("byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        data = content("data.pkl")
        value = Machine(MAKERS, storages.find, len(data)).run(data)
        for key, storage in storages.items():
            storage.start, size = find(f"data/{key}")
            if size != storage.count * storage.dtype.itemsize:
                raise ValueError(
                    f"storage {key} has {size} bytes, not those of {storage.count} "
                    "numbers"
                )
    return value
