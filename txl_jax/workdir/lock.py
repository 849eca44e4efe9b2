"""The lock of a run's folder: one run at a time writes there.

The kernel releases the lock when its process ends. A workdir on gs:// has none.
"""

import contextlib
import datetime
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import storage
from txl_jax.runtime.explain import failed_path

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # on some network disks


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
        where, reason = failed_path(error) or folder, error.strerror
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
