"""Files of results that a user names, and the JSON of results."""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from txl_jax.errors import UserError
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.preemption import listening
from txl_jax.runtime.storage import Json


def to_json(result: object, indent: int | None = None) -> str:
    """Returns the result as JSON, with null for NaN and infinity."""

    def valid(x: object) -> object:
        if isinstance(x, dict):
            return {name: valid(part) for name, part in x.items()}
        if isinstance(x, (list, tuple)):
            return [valid(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(valid(result), indent=indent, allow_nan=False)


@contextlib.contextmanager
def open_output(path: str, field: str) -> Iterator[io.BytesIO]:
    """Opens a file with `storage.replacing`, in the first process; "" = nowhere."""
    if path and distributed.is_first():
        with storage.replacing(storage.local_path(path, field)) as file:
            yield file
    else:
        yield io.BytesIO()


def require_other(path: str, read: Iterable[Path], field: str) -> None:
    """Raises UserError if a file to write is one of the files to read."""
    target = storage.local_path(path, field)
    if path and target.exists() and any(map(target.samefile, read)):
        raise UserError(f"{field} = {path!r} is a text to read: choose another")


@contextlib.contextmanager
def json_lines(path: str, field: str) -> Iterator[Callable[[Json], None]]:
    """Opens a file of JSON lines; yields a function that writes one; "" = nowhere.

    The file is PATH.incomplete until the context has ended without an error.
    """
    if not path or not distributed.is_first():
        yield lambda record: None
        return
    target = storage.local_path(path, field)
    fresh = target
    if is_file := target.is_file() or not target.exists():  # no pipe, no device
        target = Path(os.path.realpath(target))
        fresh = Path(f"{target}.incomplete")
    with storage.naming(target):
        file = fresh.open("w", encoding="utf-8")
    with file, listening(f"ended by a signal: {fresh} is incomplete"):
        yield lambda record: print(to_json(record), file=file, flush=True)
    if is_file:
        fresh.replace(target)
