"""Locks a run's folder, and writes complete files into it, also on gs://.

The kernel releases the lock of a local workdir when its process ends; a workdir on
gs:// has none. An object store cannot append, as metrics.jsonl and TensorBoard's events
need, and libraries that draw pictures and traces write local files only.
"""

import contextlib
import datetime
import errno
import io
import os
import socket
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import jax
import numpy as np
from filelock import FileLock, Timeout

from txl_jax.errors import UserError
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.report.output import to_json
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.explain import explain
from txl_jax.runtime.storage import DAMAGE, Json

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # on some network disks
UNWRITTEN = "unwritten"  # in a result whose files could not be written: the reason
UNREADABLE = (*DAMAGE, EOFError, OSError, MemoryError, RuntimeError, zipfile.BadZipFile)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a local workdir, in process 0; raises UserError if another run has it."""
    if jax.process_index() or storage.is_remote(folder):
        yield
        return
    path = folder / LOCK
    lock = FileLock(path, fallback_to_soft=False)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    owner = f"process {os.getpid()} on {socket.gethostname()}, started {now}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(f"{owner}\n", "utf-8")
    except Timeout as error:
        owner = path.read_text("utf-8").strip() or "another process"
        raise UserError(
            f"{folder} is in use by another run ({owner}): wait for it, stop it, or "
            "give another --workdir"
        ) from error
    except OSError as error:
        where, reason = storage.place(error) or folder, error.strerror
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"cannot write {where} ({reason}): give another --workdir"
            ) from error
        say(f"{folder} cannot be locked ({reason}): let no other run use it")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


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
        """Uploads new and changed files; raises one of `storage.errors`."""
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
            except storage.errors() as error:
                if kind is None:
                    raise
                reason = storage.one_line(error)
                say(f"{self.workdir} LACKS THE LAST LINES OF ITS LOGS ({reason})")


@contextlib.contextmanager
def writing(workdir: Path, result: Json) -> Iterator[Path]:
    """Yields the folder for a result's files; a failure is added to the result."""
    if not storage.is_remote(workdir):  # a packaged model has no folder yet
        workdir.mkdir(parents=True, exist_ok=True)
    try:
        with Staging(workdir) as staging:
            yield staging.folder
    except storage.errors() as error:
        result[UNWRITTEN] = explain(error) or (
            f"cannot write to {workdir} ({storage.one_line(error)}): check the "
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
    """Writes arrays by name to a .npz; raises one of `storage.errors`."""
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
