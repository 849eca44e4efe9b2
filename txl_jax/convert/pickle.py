"""Reads pickles and files of torch.save without executing anything in them."""

import io
import mmap
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from txl_jax.data.byte_ranges import reading
from txl_jax.errors import UserError, refuse
from txl_jax.runtime.explain import one_line

DTYPES = {"Double": "f8", "Float": "f4", "Half": "f2", "BFloat16": ml_dtypes.bfloat16}
DTYPES |= {"Long": "i8", "Int": "i4", "Short": "i2", "Char": "i1"}
DTYPES |= {"Byte": "u1", "Bool": "u1"}

Value = Any  # any content of a pickle


class Object:
    """An instance of a class that is not imported, with its attributes."""

    state: dict[str, Value] = {}

    def __init__(self, *_: Value) -> None: ...

    def extend(self, *_: Value) -> None:
        """Drops the items of an unknown container."""

    append = __setitem__ = extend


class Table(dict[Value, Value]):
    """A dict that drops items whose keys could be slow to compare, or all collide."""

    def __init__(self, items: Value = ()) -> None:
        for key, value in items:
            self[key] = value
        if items:
            items.clear()  # a pickle could pass the same list many times

    def __setitem__(self, key: Value, value: Value) -> None:
        if type(key) is str or (type(key) is int and -(2**64) < key < 2**64):
            super().__setitem__(key, value)


def _view(
    x: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Value
) -> np.ndarray:
    steps = [x.itemsize * step for step in strides]
    result = np.ndarray(shape, x.dtype, x, x.itemsize * offset, steps)
    ends = [(n - 1) * step for n, step in zip(result.shape, steps, strict=True)]
    last = x.itemsize * offset + sum(ends)  # NumPy's own check overflows
    exceeds = min(0, *steps) < 0 or result.size > x.size or last >= x.nbytes
    refuse(exceeds and result.size, f"shape {result.shape} exceeds its storage")
    return result


KNOWN: dict[str, type | str | Callable[..., Value]] = {
    **{f"torch.{name}Storage": name for name in DTYPES},
    "collections.OrderedDict": Table,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}
PYTHON: Any = pickle._Unpickler  # whose opcodes can be replaced


class Unpickler(PYTHON):
    """Reads the next value of a file in linear time, with zeros as its storages."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, encoding="utf-8", errors="replace")
        self.memo, self.room = Table(), size
        self.storages: dict[str, bytearray] = {}
        self.value = self.load()

    def find_class(self, module: str, name: str) -> Value:
        """Returns a stand-in, mostly Object, and imports nothing."""
        return KNOWN.get(f"{module[:80]}.{name[:80]}", Object)

    def persistent_load(self, pid: Value) -> Value:
        """Returns the class or storage of an id that torch.save wrote."""
        if pid[0] == "module":
            return pid[1]
        _, name, key, _, count, *view = pid[:6]
        refuse(
            any(view) or not type(name) is type(key) is str, "a storage is not plain"
        )
        if key not in self.storages:
            size = count * np.dtype(DTYPES[name]).itemsize
            self.room -= size
            refuse(self.room < 0, "its storages exceed the file")
            self.storages[key] = bytearray(size)
        return np.frombuffer(memoryview(self.storages[key]).toreadonly(), DTYPES[name])

    def _call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.stack[-1](*args[:9])  # KNOWN functions take fewer

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Object) and isinstance(state, dict):
            self.stack[-1].state = state

    dispatch = {
        **PYTHON.dispatch,
        **{pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.BUILD[0]: _build},
        pickle.EMPTY_DICT[0]: lambda self: self.append(Table()),
        pickle.DICT[0]: lambda self: self.append(Table(self.pop_mark())),  # of no items
        pickle.EMPTY_SET[0]: PYTHON.load_empty_list,  # a list, whose items need no hash
        pickle.ADDITEMS[0]: PYTHON.load_appends,
        pickle.FROZENSET[0]: PYTHON.load_list,
        **dict.fromkeys(pickle.BYTEARRAY8 + pickle.NEWOBJ_EX),  # not linear: refused
    }


def read_pickle(path: Path) -> Value:
    """Returns the content of a file: plain values, arrays and inert Objects."""
    with reading(path):
        file, size = path.open("rb"), path.stat().st_size
    try:
        with file:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                if any(entry.compress_type for entry in archive.infolist()):
                    raise ValueError("it is compressed")
                (name,) = [x for x in archive.namelist() if x.endswith("/data.pkl")]
                main = Unpickler(io.BytesIO(archive.read(name)), size)
                for key, storage in main.storages.items():
                    memoryview(storage)[:] = archive.read(f"{name[:-8]}data/{key}")
                return main.value
            source: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            main = order = Unpickler(source, size)
            if main.value == 0x1950A86A20F9469CFC6C:  # versions, sizes, value, storages
                _, _, main, order = [Unpickler(source, size) for _ in range(4)]
            if main.storages and order.value != sorted(main.storages):
                raise ValueError("its storages differ from its tensors'")
            for _, storage in sorted(main.storages.items()):  # each after its size
                memoryview(storage)[:] = source.read(8 + len(storage))[8:]
            return main.value
    except Exception as error:  # hostile files cause errors of many types
        raise UserError(
            f"{path} was not written by torch.save or pickle, or is damaged: "
            f"{one_line(error)}"
        ) from error
