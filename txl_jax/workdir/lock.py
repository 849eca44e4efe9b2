"""The lock of a workdir: one run at a time.

The kernel releases the lock when its process ends, even by a kill. Reading a workdir
takes no lock.
"""

import contextlib
import datetime
import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.workdir import bucket

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network disks


class InUse(UserError):
    """Another process of this machine holds the lock."""


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Creates and locks `workdir`; raises UserError if another run holds the lock.

    Process 0 locks for all processes of a run. For a workdir in a bucket both the local
    folder and the bucket are locked.
    """
    if jax.process_index():
        yield
        return
    remote = bucket.of(workdir)
    lock_remote = remote.locked if remote else contextlib.nullcontext
    with locked_folder(workdir), lock_remote():
        yield


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates and locks a folder; raises InUse if another process holds the lock.

    On a file system without locks, prints a warning and continues without one.
    """
    path = folder / LOCK
    lock = FileLock(path, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InUse(
            f"{folder} is in use by another run ({_holder(path)}): wait for it, stop "
            "it, or give another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"cannot write {error.filename or folder} ({error.strerror}): give "
                "another --workdir"
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
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": now}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode() + b"\n", 0)


def _holder(path: Path) -> str:
    try:
        run = json.loads(path.read_bytes())
        return f"process {run['pid']} on {run['host']}, started {run['started']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
