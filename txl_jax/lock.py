"""One workdir, one run at a time: a lock that says who holds it.

The kernel gives the lock back when its process ends, however it ends, so that a file
that a kill leaves behind stops nobody. Reading a workdir takes no lock.

Dims: none.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax

from txl_jax import bucket
from txl_jax.errors import UserError
from txl_jax.report.writer import say

LOCK = "run.lock"


class InUse(UserError):
    """Another run of this machine has the folder."""


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes `workdir` and holds its lock; raises UserError if another run has it.

    One process of a run locks for all of them. Of a workdir in a bucket both the folder
    here and the bucket are locked.
    """
    if jax.process_index():
        yield
        return
    there = bucket.of(workdir)
    with held(workdir), there.locked() if there else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; raises InUse if another process has it.

    Where the file system has no locks (some of networks), this says so and holds
    nothing.
    """
    path = workdir / LOCK
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        held = _take(path)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or workdir} ({error.strerror}): give "
            "another --workdir"
        ) from error
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(held)


def _take(path: Path) -> int | None:
    """Returns the descriptor that holds the lock, None where there are no locks."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(file).st_ino == path.stat().st_ino
        except FileNotFoundError:
            mine = False
        except OSError as error:
            holder = os.pread(file, 4096, 0)
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InUse(_refusal(path, holder)) from error
            say(
                f"{path.parent} cannot be locked ({error.strerror}): see to it that no "
                "second run uses it"
            )
            return None
        if mine:
            break
        os.close(file)  # the holder has just ended and removed it
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "started": now}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(who).encode() + b"\n", 0)
    return file


def _refusal(path: Path, holder: bytes) -> str:
    try:
        who = json.loads(holder)
        said = f"process {who['pid']} on {who['host']}, started {who['started']}"
    except (ValueError, TypeError, KeyError):
        said = "another process"
    return (
        f"{path.parent} is in use by another run ({said}): wait for it, stop it, or "
        "give another --workdir"
    )
