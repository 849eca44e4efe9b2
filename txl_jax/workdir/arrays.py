"""Arrays that are kept in a workdir, and computed again if their file is damaged."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from txl_jax.report.checksum import DAMAGE
from txl_jax.report.log import say
from txl_jax.runtime import storage

UNREADABLE = (*DAMAGE, EOFError, OSError, RuntimeError, zipfile.BadZipFile)


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name to a .npz; raises one of `storage.errors`."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    storage.write_atomically(path, lambda new: new.write_bytes(file.getvalue()))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, {} if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
            return dict(saved)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        say(f"{path} is damaged ({error}): it is made again")
        return {}
