"""Reads pickles and files of torch.save without executing anything in them."""

import math
import mmap
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from txl_jax.data.byte_ranges import reading
from txl_jax.errors import UserError
from txl_jax.runtime.storage import one_line

DTYPES = {"Double": "f8", "Float": "f4", "Half": "f2", "BFloat16": ml_dtypes.bfloat16}
DTYPES |= {"Long": "i8", "Int": "i4", "Short": "i2", "Char": "i1"}
DTYPES |= {"Byte": "u1", "Bool": "u1"}

Value = Any  # any content of a pickle


class Object:
    """An instance of a class that is not imported, with its attributes."""

    state: dict[str, Value] = {}

    def __init__(self, *_: Value) -> None: ...

    def __setstate__(self, state: Value) -> None:
        self.state = state if isinstance(state, dict) else {}

    def extend(self, *_: Value) -> None:
        """Drops the items of an unknown container."""

    append = __setitem__ = extend


def _view(
    x: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Value
) -> np.ndarray:
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    size, last = math.prod(shape), offset + sum(ends)  # NumPy's own check overflows
    if min((offset, *shape, *strides)) < 0 or size > x.size or size and last >= x.size:
        raise ValueError(f"a tensor exceeds its storage: shape {shape}")
    steps = [x.itemsize * step for step in strides]
    return np.ndarray(shape, x.dtype, x, x.itemsize * offset, steps)


# Names in Python's modules are refused unless KNOWN; all others become Objects.
PYTHON = {*sys.stdlib_module_names, "__builtin__"} - {"argparse", "re", "_codecs"}
KNOWN: dict[str, type | str | Callable[..., Value]] = {
    **{f"torch.{name}Storage": name for name in DTYPES},
    **{f"__builtin__.{name}": Object for name in ("object", "set", "frozenset")},
    **{f"builtins.{name}": Object for name in ("object", "set", "frozenset")},
    **{"copy_reg._reconstructor": Object, "copyreg._reconstructor": Object},
    **{"collections.OrderedDict": OrderedDict, "collections.Counter": dict},
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}


class Unpickler(pickle.Unpickler):
    """Reads the next value of a file, with zeros instead of its storages."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.storages: dict[str, np.ndarray] = {}
        start = file.tell()
        for opcode, number, at in pickletools.genops(file):  # this checks all lengths
            if "PUT" in opcode.name and (number or 0) > (at or 0):  # bounds the memo
                raise ValueError(f"value {number} exceeds the file")
        file.seek(start)
        self.value = self.load()

    def find_class(self, module: str, name: str) -> Value:
        """Returns a stand-in for a class or function, and imports nothing."""
        path = f"{module}.{name}"
        if path not in KNOWN and module.partition(".")[0] in PYTHON:
            raise pickle.UnpicklingError(f"{path[:80]} is not allowed")
        return KNOWN.get(path, Object)

    def persistent_load(self, pid: Value) -> Value:
        """Returns the class or storage of an id that torch.save wrote."""
        if pid[0] == "module":
            return pid[1]
        _, kind, key, _, count, *view = pid
        if any(view):
            raise ValueError("a storage is a view of another")
        return self.storages.setdefault(key, np.zeros(count, DTYPES[kind]))


def read_pickle(path: Path) -> Value:
    """Returns the content of a file: plain values, arrays and inert Objects."""
    with reading(path):
        file = path.open("rb")
    try:
        with file:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                if any(entry.compress_type for entry in archive.infolist()):
                    raise ValueError("it is compressed")
                (name,) = [x for x in archive.namelist() if x.endswith("/data.pkl")]
                main = Unpickler(archive.open(name))
                for key, storage in main.storages.items():
                    storage.view("u1").data[:] = archive.read(f"{name[:-8]}data/{key}")
                return main.value
            source: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            main = order = Unpickler(source)
            if main.value == 0x1950A86A20F9469CFC6C:  # versions, sizes, value, storages
                _, _, main, order = [Unpickler(source) for _ in range(4)]
            if main.storages and order.value != sorted(main.storages):
                raise ValueError("its storages differ from its tensors'")
            for _, storage in sorted(main.storages.items()):  # each after its size
                storage.view("u1").data[:] = source.read(8 + storage.nbytes)[8:]
            return main.value
    except Exception as error:  # hostile files cause errors of many types
        raise UserError(
            f"{path} was not written by torch.save or pickle, or is damaged: "
            f"{one_line(error)}"
        ) from error
