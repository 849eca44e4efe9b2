"""The owner of a workdir: one run trains there at a time; reading needs no lock.

A local workdir has a lock, which the kernel releases when its process ends. On gs:// a
new start takes the workdir over at once, by writing its id into one object. Before its
next checkpoint, the replaced run finds the new id and ends.
"""

import contextlib
import datetime
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import storage

LOCK = "run.lock"
UNKNOWN = "another process"  # the owner, if LOCK is damaged or was deleted
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network disks
Fence = Callable[[], object]  # raises Replaced; called before a run writes to gs://


class Replaced(UserError):
    """Another run has taken this run's workdir over."""


def unfenced() -> None:
    """The fence of local workdirs, and of all processes but the first."""


def locked(workdir: Path) -> contextlib.AbstractContextManager[Fence]:
    """Makes this run the owner of `workdir`, through process 0; raises UserError."""
    if jax.process_index():
        return contextlib.nullcontext(unfenced)
    return (_owned if storage.is_remote(workdir) else _locked_folder)(workdir)


def _this_process() -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return f"process {os.getpid()} on {socket.gethostname()}, started {now}"


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[Fence]:
    path = folder / LOCK
    lock = FileLock(path, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(f"{_this_process()}\n", "utf-8")
    except Timeout as error:
        owner = path.read_text("utf-8").strip() or UNKNOWN
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
        yield unfenced
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


@contextlib.contextmanager
def _owned(workdir: Path) -> Iterator[Fence]:
    from google.api_core.exceptions import PreconditionFailed
    from google.cloud import storage as google

    path, own = workdir / LOCK, {"owner": _this_process()}

    def find() -> Any:
        """Returns the object if it is still this run's; else raises Replaced."""
        now = blob.bucket.get_blob(blob.name)
        if now and now.metadata == own:
            return now
        owner = (now and now.metadata or {}).get("owner", UNKNOWN)
        raise Replaced(f"{workdir} was taken over by {owner}: this run ends")

    try:
        blob = google.Blob.from_uri(str(path), google.Client())
        before = blob.bucket.get_blob(blob.name)
        blob.metadata = own  # read in one call with the generation
        with contextlib.suppress(PreconditionFailed):  # `find` reads who was first
            generation = before.generation if before else 0  # 0: no such object
            blob.upload_from_string(own["owner"], if_generation_match=generation)
        find()
    except storage.errors() as error:
        raise UserError(
            f"cannot write {path} ({storage.one_line(error)}): check the address and "
            "the permissions, which must include storage.buckets.get"
        ) from error
    if before:
        owner = (before.metadata or {}).get("owner", UNKNOWN)
        say(f"{workdir} is taken over from {owner}, which ends at its next checkpoint")
    try:
        yield find
    finally:
        with contextlib.suppress(Replaced, *storage.errors()):
            now = find()
            now.delete(if_generation_match=now.generation)
