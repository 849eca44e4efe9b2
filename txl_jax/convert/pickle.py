"""Interprets pickles and files of torch.save without executing them.

The layouts are a zip archive (since PyTorch 1.6), the sequence of pickles and raw
storages before it, and a bare pickle. Tensors are memory-mapped when they are opened.
"""

import dataclasses
import math
import mmap
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from txl_jax.errors import UserError
from txl_jax.runtime.storage import one_line, regular

MAGIC = 0x1950A86A20F9469CFC6C  # the value of the first of torch.save's old pickles
DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "<u1",
}
_Unpickler: Any = pickle._Unpickler


class Object:
    """A stand-in for a class, a function or an instance, with the class's name."""

    def __init__(self, name: str) -> None:
        self.name = name  # "module.name"
        self.state: dict[Any, Any] = {}  # attributes of an instance

    def extend(self, *items: Any) -> None:
        """Drops the items of an unknown container."""

    append = __setitem__ = extend


class Dict(dict[Any, Any]):
    """A dict that hashes only plain keys, and replaces others by stand-ins.

    Hashing nested tuples takes exponential time, or overflows the stack.
    """

    def __init__(self, pairs: Any = ()) -> None:
        for key, value in pairs:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = isinstance(key, str | bytes | int | float | None)
        super().__setitem__(key if plain else Object("key"), value)


@dataclasses.dataclass
class Storage:
    """A one-dimensional array in a file."""

    count: int
    numbers: np.ndarray  # empty until they are read

    def read(self, source: mmap.mmap, size: int) -> None:
        """Maps the next `size` bytes of a file, and moves past them."""
        if size != self.count * self.numbers.itemsize:
            raise ValueError(f"a storage of {self.count} numbers has {size} bytes")
        start = source.tell()
        source.seek(size, 1)  # raises ValueError beyond the end
        self.numbers = np.frombuffer(source, self.numbers.dtype, self.count, start)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A strided view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> np.ndarray:
        """Returns the view; raises one of DAMAGE if it is none."""
        numbers, shape, strides = self.storage.numbers, self.shape, self.strides
        tuples = type(shape) is type(strides) is tuple
        if not tuples or not len(shape) == len(strides) <= 32:
            raise ValueError("its shape or strides are malformed")
        if any(type(x) is not int or x < 0 for x in (self.offset, *shape, *strides)):
            raise ValueError("a size is negative or not an integer")
        step, size = numbers.itemsize, math.prod(shape)
        start = step * self.offset  # in bytes, like the strides and the last number
        # A stride counts only where there is a second element.
        steps = [step * x * (n > 1) for n, x in zip(shape, strides, strict=True)]
        last = start + sum((n - 1) * x for n, x in zip(shape, steps, strict=True))
        # NumPy's own check overflows.
        if size > numbers.size or size and last >= numbers.nbytes:
            raise ValueError(f"shape {shape} exceeds its storage")
        return np.ndarray(shape, numbers.dtype, numbers, start, steps)


class Unpickler(_Unpickler):
    """The standard library's unpickler in Python, with every call replaced.

    A class or function becomes an Object without an import. So does the result of its
    call, except of those in `_instantiate`. Sets become lists, so only plain keys are
    hashed. Memory is proportional to the bytes read, unlike in the C unpickler.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Object:
        """Returns a stand-in; nothing is imported."""
        return Object(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Returns the storage or class of an id that torch.save wrote."""
        if pid[0] == "module":  # a class and its source
            return pid[1]
        _, kind, key, _, count = pid[:5]
        if type(count) is not int or count < 0 or type(key) is not str or any(pid[5:6]):
            raise ValueError("a storage has no key or size, or is a view of another")
        if (dtype := DTYPES.get(kind.name.removeprefix("torch."))) is None:
            raise ValueError(f"{kind.name[:80]} is not a supported type of storage")
        return self.storages.setdefault(key, Storage(count, np.zeros(0, dtype)))

    def _decode_string(self, value: bytes) -> str:
        """Decodes a string of Python 2, which may be text or raw bytes."""
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value.decode("latin-1")

    def _instantiate(self, klass: Any, args: Any) -> None:
        match klass.name.removeprefix("torch._utils."):
            case "_rebuild_tensor" | "_rebuild_tensor_v2":
                result: Any = Tensor(*args[:4])
            case "_rebuild_parameter" | "torch.Size" | "collections.Counter":
                result = args[0]
            case "collections.OrderedDict":
                pairs = args[0] if args else []
                result = Dict(pairs)
                pairs.clear()  # a pickle must not copy one list repeatedly
            case _:
                result = Object(klass.name)
        self.append(result)

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self._instantiate(self.stack.pop(), args)

    def _load_build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, Object) and isinstance(state, dict):
            instance.state = state

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append(Dict(zip(items[::2], items[1::2], strict=True)))

    dispatch: ClassVar[dict[int, Any]] = _Unpickler.dispatch | {
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_reduce,
        pickle.BUILD[0]: _load_build,
        pickle.EMPTY_DICT[0]: lambda self: self.append(Dict()),
        pickle.DICT[0]: _load_dict,
        pickle.EMPTY_SET[0]: _Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.FROZENSET[0]: _Unpickler.dispatch[pickle.LIST[0]],
        pickle.ADDITEMS[0]: _Unpickler.dispatch[pickle.APPENDS[0]],
    }
    # EXT1, EXT2, EXT4, NEWOBJ_EX, BYTEARRAY8, NEXT_BUFFER and READONLY_BUFFER: no file
    # of torch has them, and they make calls or allocate as much memory as they declare.
    for _opcode in b"\x82\x83\x84\x92\x96\x97\x98":
        del dispatch[_opcode]


def read(path: Path) -> Any:
    """Returns the content of a file: plain values, Tensors and inert Objects."""
    try:
        with regular(path).open("rb") as file:
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if zipfile.is_zipfile(file):
                return _read_zip(zipfile.ZipFile(file), source)
            return _read_stream(source)
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}") from None
    except Exception as error:  # hostile files cause errors of many types
        raise UserError(
            f"{path} was not written by torch.save or pickle, or is damaged: "
            f"{one_line(error)}"
        ) from error


def _read_stream(source: mmap.mmap) -> Any:
    """Reads a bare pickle, or torch.save's layout before zip archives."""
    value = Unpickler(source).load()
    if value != MAGIC:
        return value
    for _ in range(2):  # the version of the protocol, and sizes of C's types
        Unpickler(source).load()
    unpickler = Unpickler(source)
    value = unpickler.load()
    for key in Unpickler(source).load():
        storage = unpickler.storages[key]
        (count,) = struct.unpack("<q", source.read(8))
        storage.read(source, count * storage.numbers.itemsize)
    return value


def _read_zip(archive: zipfile.ZipFile, source: mmap.mmap) -> Any:
    (main,) = [x for x in archive.namelist() if x.rpartition("/")[2] == "data.pkl"]

    def seek(name: str) -> int:
        """Moves to the first byte of an entry; returns its size."""
        entry = archive.getinfo(main.removesuffix("data.pkl") + name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename} is compressed or encrypted")
        source.seek(entry.header_offset + 26)
        source.seek(sum(struct.unpack("<HH", source.read(4))), 1)
        return entry.file_size

    seek("data.pkl")
    unpickler = Unpickler(source)
    value = unpickler.load()
    for key, storage in unpickler.storages.items():
        storage.read(source, seek(f"data/{key}"))
    return value
