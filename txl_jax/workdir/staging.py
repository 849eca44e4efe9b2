"""Writes complete files into a run's folder, also on gs://.

An object store cannot append, as metrics.jsonl and TensorBoard's events
need, and libraries that draw pictures and traces write local files only.
"""

import contextlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.report.output import to_json
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.explain import explain, one_line, storage_errors
from txl_jax.runtime.storage import DAMAGE, Json

UNWRITTEN = "unwritten"  # in a result whose files could not be written: the reason
UNREADABLE = (*DAMAGE, EOFError, OSError, MemoryError, RuntimeError, zipfile.BadZipFile)


class Staging:
    """A folder that is uploaded to a workdir on gs://, or a local workdir itself."""

    def __init__(self, workdir: Path, *downloaded: str):
        """Opens the folder; the first process downloads these files if they exist."""
        self.workdir = self.folder = workdir
        self._stack = contextlib.ExitStack()
        self._uploaded: dict[Path, tuple[int, int]] = {}
        if storage.is_remote(workdir):
            temporary = tempfile.TemporaryDirectory(prefix="txl_jax-")
            self.folder = Path(self._stack.enter_context(temporary))
            for name in downloaded if distributed.is_first() else ():
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / name).write_bytes((workdir / name).read_bytes())
            self._uploaded = self._files()

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Returns the size and the modification time of each file."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        states = {path: path.stat() for path in sorted(paths) if path.suffix != ".tmp"}
        return {path: (s.st_size, s.st_mtime_ns) for path, s in states.items()}

    def upload(self) -> None:
        """Uploads new and changed files; raises one of `storage_errors`."""
        if self.folder == self.workdir:
            return
        for path, state in self._files().items():
            if self._uploaded.get(path) != state:
                remote = self.workdir / path.relative_to(self.folder).as_posix()
                remote.write_bytes(path.read_bytes())
                self._uploaded[path] = state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stack:
            try:
                self.upload()
            except storage_errors() as error:
                if kind is None:
                    raise
                reason = one_line(error)
                say(f"{self.workdir} LACKS THE LAST LINES OF ITS LOGS ({reason})")


@contextlib.contextmanager
def writing(workdir: Path, result: Json) -> Iterator[Path]:
    """Yields the folder for a result's files; a failure is added to the result."""
    if not storage.is_remote(workdir):  # a packaged model has no folder yet
        workdir.mkdir(parents=True, exist_ok=True)
    try:
        with Staging(workdir) as staging:
            yield staging.folder
    except storage_errors() as error:
        result[UNWRITTEN] = explain(error) or (
            f"cannot write to {workdir} ({one_line(error)}): check the "
            "permissions and the network, and run the command again"
        )


def write_files(stem: Path, result: Json, plot: Callable[[Json, Path], None]) -> Json:
    """Writes a result as JSON and as a picture; returns names and provenance."""
    if not distributed.is_first():
        return {}
    made = {
        "picture": f"{stem}.png",
        "file": f"{stem}.json",
        "provenance": provenance.describe_result(),
    }
    text = to_json(result | made, indent=2) + "\n"
    lost: Json = {}
    with writing(stem.parent, lost) as folder:
        plot(result, folder / f"{stem.name}.png")
        storage.write_atomically(folder / f"{stem.name}.json", text)
    return {"provenance": made["provenance"], **lost} if lost else made


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name to a .npz; raises one of `storage_errors`."""
    with storage.replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, {} if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
            return dict(saved)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        say(f"{path} is damaged ({error}), and is made again")
        return {}
