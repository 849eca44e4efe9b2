"""The lock of a workdir: one run at a time; reading takes no lock.

The kernel releases a local lock when its process ends, even by a kill. On gs:// the
lock is an object that its holder rewrites every 20 seconds. Each write states the
generation that it replaces, so of two runs only one succeeds. A lock that has not been
rewritten for 90 seconds, or whose process is known to be dead, is taken over.
"""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

from txl_jax.errors import USER_ERROR, UserError
from txl_jax.report.log import say
from txl_jax.runtime import distributed, storage

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network disks

# Of a lock on gs://.
BEAT_SECONDS = 20.0  # between two writes
DEAD_SECONDS = 90.0  # without a write, until the lock is taken over
LOOK_SECONDS = 2.0
FREE = 0  # the generation of an object that does not exist


def locked(workdir: Path) -> AbstractContextManager[None]:
    """Creates and locks `workdir`; raises UserError if another run holds the lock.

    Process 0 locks for all processes of a run. On a local file system without locks,
    prints a warning and continues without one.
    """
    if jax.process_index():
        return contextlib.nullcontext()
    if storage.is_remote(workdir):
        return _leased(workdir / LOCK)
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


@contextlib.contextmanager
def _leased(path: Path) -> Iterator[None]:
    """Holds the lock at `path` on gs://; raises UserError if another run holds it.

    If another run takes the lock over, because this one could not write for 90 seconds,
    a thread ends the process at once.
    """
    try:
        lease = Lease(path)
        lease.take()
    except storage.errors() as error:
        raise UserError(
            f"cannot write {path} ({storage.one_line(error)}): check the address and "
            "the rights, which must include storage.buckets.get"
        ) from error
    ended = threading.Event()
    thread = threading.Thread(target=lease.keep, args=[ended], name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lease.release()


class Lease:
    """One process's claim on the lock at `path`."""

    def __init__(self, path: Path):
        from google.cloud import storage as google

        bucket, _, self.name = str(path).removeprefix(storage.SCHEME).partition("/")
        self.path = path
        self._bucket = google.Client().bucket(bucket)
        self.holder = this_process()
        self.generation = FREE

    def take(self) -> None:
        """Waits until the lock is held; raises UserError if another run rewrites it."""
        generation = FREE
        while not self.write(generation):
            generation, holder = self.read()
            if generation != FREE and not is_dead(holder):
                self._watch(generation, describe(holder))
        if generation != FREE:
            say(f"{self.path} is taken over")

    def _watch(self, generation: int, who: str) -> None:
        """Returns when the lock is free or its holder silent; else raises UserError."""
        say(
            f"{self.path} is held ({who}): it is taken over after {DEAD_SECONDS:.0f} s "
            "without a sign of life"
        )
        begin = time.monotonic()
        while time.monotonic() - begin < DEAD_SECONDS:
            time.sleep(LOOK_SECONDS)
            current, _ = self.read()
            if current == FREE:
                return
            if current != generation:
                raise UserError(
                    f"{self.path.parent} is in use by another run ({who}): wait for "
                    "it, stop it, or give another --workdir"
                )

    def write(self, generation: int) -> bool:
        """Writes the lock if its generation is still this; returns whether it was.

        A write whose answer was lost is repeated by the library and then refused,
        although the lock is this process's.
        """
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self.name)
        blob.metadata = self.holder
        try:
            text = json.dumps(self.holder) + "\n"
            blob.upload_from_string(text, if_generation_match=generation)
            self.generation = int(blob.generation)
        except PreconditionFailed:
            current, holder = self.read()
            if holder != self.holder:
                return False
            self.generation = current
        return True

    def read(self) -> tuple[int, dict[str, str]]:
        """Returns the lock's generation, FREE if there is none, and its holder.

        Both come from the object's metadata, so that they belong together.
        """
        blob = self._bucket.get_blob(self.name)
        return (int(blob.generation), dict(blob.metadata or {})) if blob else (FREE, {})

    def keep(self, ended: threading.Event) -> None:
        """Rewrites the lock until `ended`; ends the process if the lock is lost."""
        while not ended.wait(BEAT_SECONDS):
            with contextlib.suppress(*storage.errors()):  # the next may pass
                if not self.write(self.generation):
                    line = f"{self.path.parent} was taken over by another run"
                    distributed.exit_now(f"{line}: this one ends", USER_ERROR)

    def release(self) -> None:
        """Deletes the lock; if that fails, it is taken over after its time."""
        with contextlib.suppress(*storage.errors()):
            generation, holder = self.read()
            if holder == self.holder:
                self._bucket.delete_blob(self.name, if_generation_match=generation)


def this_process() -> dict[str, str]:
    """Returns this process as the holder of a lock."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    process = {"host": socket.gethostname(), "pid": str(os.getpid())}
    return process | {"started": now, "machine": machine()}


def machine() -> str:
    """Returns a key of the system in which process ids are unique; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_dead(holder: dict[str, str]) -> bool:
    """Returns whether a lock's holder was a process of this machine that has ended."""
    if not holder.get("machine") or holder["machine"] != machine():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


def describe(holder: Any) -> str:
    """Describes the holder of a lock, whose JSON may be damaged."""
    try:
        pid, host, started = (holder[name] for name in ("pid", "host", "started"))
        return f"process {pid} on {host}, started {started[:19]}"
    except (TypeError, KeyError):
        return "another process"
