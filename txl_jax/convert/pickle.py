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
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from txl_jax.errors import UserError
from txl_jax.runtime.storage import regular

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
DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, ArithmeticError),
    *(MemoryError, RuntimeError, pickle.UnpicklingError, struct.error),
    zipfile.BadZipFile,
)
_Unpickler: Any = pickle._Unpickler


class Object:
    """A stand-in for a class, a function or an instance, with the class's name."""

    def __init__(self, name: str) -> None:
        self.name = name  # "module.name"
        self.state: dict[Any, Any] = {}  # attributes of an instance

    def extend(self, items: Any) -> None:
        """Drops the items of an unknown container."""

    append = extend


@dataclasses.dataclass
class Storage:
    """A one-dimensional array in a file."""

    dtype: np.dtype
    count: int
    start: int = -1  # offset of the first byte; -1 = not in the file


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A strided view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for values of another kind."""
        shape, strides = self.shape, self.strides
        if not isinstance(self.storage, Storage) or type(shape) is not tuple:
            raise TypeError("a tensor has no storage or no shape")
        if type(strides) is not tuple or len(shape) != len(strides) or len(shape) > 32:
            raise ValueError(f"a tensor has {len(shape)} sizes, and strides {strides}")
        if any(type(n) is not int or n < 0 for n in (self.offset, *shape, *strides)):
            raise ValueError("a tensor has a size that is negative or not an integer")

    def open(self, path: Path) -> np.ndarray:
        """Maps the view; raises ValueError if it exceeds its storage."""
        dtype, count, start = dataclasses.astuple(self.storage)
        size, step = math.prod(self.shape), dtype.itemsize
        spans = [(n - 1) * x for n, x in zip(self.shape, self.strides, strict=True)]
        if size > count or (size and self.offset + sum(spans) >= count):
            raise ValueError(f"shape {self.shape} exceeds its storage")
        if start < 0 or start + count * step > path.stat().st_size:
            raise ValueError("its storage is missing or incomplete")
        if not size:
            return np.zeros(self.shape, dtype)
        numbers = np.memmap(path, dtype, "r", start, (count,))[self.offset :]
        # A stride counts only where there is a second element.
        strides = [
            step * x * (span > 0) for x, span in zip(self.strides, spans, strict=True)
        ]
        return np.lib.stride_tricks.as_strided(
            numbers, self.shape, strides, writeable=False
        )


def _dict(args: Any) -> Any:
    """Returns the dict of an OrderedDict's or a Counter's arguments."""
    content = args[0] if args else {}
    if not isinstance(content, list):
        return content
    result: dict[Any, Any] = {}
    _fill(result, [x for key, value in content for x in (key, value)])
    content.clear()  # a pickle must not copy one list repeatedly
    return result


def _fill(target: Any, items: list[Any]) -> None:
    """Assigns keys and values, which alternate, to a dict; drops other items."""
    if not isinstance(target, dict):
        return
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Hashing nested tuples takes exponential time, or overflows the stack.
        plain = isinstance(key, str | bytes | int | float | None)
        target[key if plain else Object("key")] = value


# Functions of the arguments that replace callables whose result is needed.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "torch._utils._rebuild_tensor": lambda args: Tensor(*args[:4]),
    "torch._utils._rebuild_tensor_v2": lambda args: Tensor(*args[:4]),
    "torch._utils._rebuild_parameter": lambda args: args[0],
    "torch.Size": lambda args: args[0],
    "copyreg._reconstructor": lambda args: Object(args[0].name),
    "copy_reg._reconstructor": lambda args: Object(args[0].name),
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
}


class Unpickler(_Unpickler):
    """The standard library's unpickler in Python, with every call replaced.

    A class or function becomes an Object without an import. So does the result of its
    call, unless MAKERS has a replacement. Sets become lists, so only plain keys are
    hashed. Memory is proportional to the bytes read, unlike in the C unpickler.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

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
        return self.storages.setdefault(key, Storage(np.dtype(dtype), count))

    def _decode_string(self, value: bytes) -> str:
        """Decodes a string of Python 2, which may be text or raw bytes."""
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value.decode("latin-1")

    def _instantiate(self, klass: Any, args: Any) -> None:
        maker = MAKERS.get(klass.name)
        self.append(maker(args) if maker else Object(klass.name))

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self._instantiate(self.stack.pop(), args)

    def _load_build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, Object) and isinstance(state, dict):
            instance.state = state

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [key, value])

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], items)

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        _fill(self.stack[-1], items)

    for _code, _load in {
        pickle.REDUCE: _load_reduce,
        pickle.NEWOBJ: _load_reduce,
        pickle.BUILD: _load_build,
        pickle.SETITEM: _load_setitem,
        pickle.SETITEMS: _load_setitems,
        pickle.DICT: _load_dict,
        pickle.EMPTY_SET: dispatch[pickle.EMPTY_LIST[0]],
        pickle.FROZENSET: dispatch[pickle.LIST[0]],
        pickle.ADDITEMS: dispatch[pickle.APPENDS[0]],
    }.items():
        dispatch[_code[0]] = _load
    # EXT1, EXT2, EXT4, NEWOBJ_EX, BYTEARRAY8, NEXT_BUFFER and READONLY_BUFFER: no file
    # of torch has them, and they make calls or allocate as much memory as they declare.
    for _opcode in b"\x82\x83\x84\x92\x96\x97\x98":
        del dispatch[_opcode]


def read(path: Path) -> Any:
    """Returns the content of a file: plain values, Tensors and inert Objects."""
    try:
        if zipfile.is_zipfile(regular(path)):
            return _read_zip(path)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source,
        ):
            return _read_stream(source)
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}") from None
    except (*DAMAGE, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{path} was not written by torch.save or pickle, or is damaged: {reason}"
        ) from error


def _read_stream(source: mmap.mmap) -> Any:
    """Reads a bare pickle, or torch.save's layout before zip archives."""
    value = Unpickler(source).load()
    if value != MAGIC:
        return value
    Unpickler(source).load()  # the version of the protocol
    Unpickler(source).load()  # sizes of C's types
    unpickler = Unpickler(source)
    value = unpickler.load()
    for key in Unpickler(source).load():
        storage = unpickler.storages[key]
        (count,) = struct.unpack("<q", source.read(8))
        storage.start = source.tell()
        if count != storage.count:
            raise ValueError(f"storage {key} has {count} numbers, not {storage.count}")
        source.seek(count * storage.dtype.itemsize, 1)
    return value


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        (main,) = [x for x in archive.namelist() if x.rpartition("/")[2] == "data.pkl"]
        folder = main.removesuffix("data.pkl")

        def find(name: str) -> int:
            """Seeks the first byte of an entry; returns its size."""
            entry = archive.getinfo(folder + name)
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename} is compressed or encrypted")
            file.seek(entry.header_offset + 26)
            start = file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
            if start + entry.file_size > path.stat().st_size:
                raise ValueError(f"the file ends within {entry.filename}")
            return entry.file_size

        unpickler = Unpickler(BytesIO(file.read(find("data.pkl"))))
        value = unpickler.load()
        for key, storage in unpickler.storages.items():
            if find(f"data/{key}") != storage.count * storage.dtype.itemsize:
                raise ValueError(f"storage {key} does not have {storage.count} numbers")
            storage.start = file.tell()
        return value
