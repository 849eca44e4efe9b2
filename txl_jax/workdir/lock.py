"""The lock of a workdir: one run at a time.

The kernel releases a local lock when its process ends, even by a kill; see `lease` for
gs://. Reading a workdir takes no lock.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import storage
from txl_jax.workdir.lease import describe, leased, this_process

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network disks


def locked(workdir: Path) -> AbstractContextManager[None]:
    """Creates and locks `workdir`; raises UserError if another run holds the lock.

    Process 0 locks for all processes of a run. On a local file system without locks,
    prints a warning and continues without one.
    """
    if jax.process_index():
        return contextlib.nullcontext()
    if storage.is_remote(workdir):
        return leased(workdir / LOCK)
    return _locked_folder(workdir)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    lock = FileLock(path, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{folder} is in use by another run ({_holder(path)}): wait for it, stop "
            "it, or give another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"cannot write {storage.place(error) or folder} ({error.strerror}): "
                "give another --workdir"
            ) from error
        say(
            f"{folder} cannot be locked ({error.strerror}): make sure that no second "
            "run uses it"
        )
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.unlink()
            lock.release()


def _write_holder(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(this_process()).encode() + b"\n", 0)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return describe(json.loads(path.read_bytes()))
    return describe({})
