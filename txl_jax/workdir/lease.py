"""The lock of a workdir in a bucket: an object that its holder writes again and again.

Nothing gives it back when its holder is killed, so one that is not written any more is
taken over. Every copy to the bucket asks first whether the lock is still its own.

Dims: none.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

from txl_jax.errors import UserError
from txl_jax.report.log import say

NAME = "bucket.lock"  # in the bucket; in the folder: the last that was taken from it
BEAT_SECONDS = 20.0  # between two writings
DEAD_SECONDS = 90.0  # without one, until the lock is taken over
LOOK_SECONDS = 2.0


class Lost(UserError):
    """Another run has taken the bucket over."""


def read(fs: Any, where: str) -> str:
    """Returns the text of an object, "" if there is none."""
    try:
        return str(fs.cat_file(where).decode())
    except FileNotFoundError:
        return ""


class Lease:
    """Holds the lock inside a `with`; raises UserError if another run does.

    Whoever enters has the folder for itself, so a lock that was last taken from there
    is a dead process's.
    """

    def __init__(self, fs: Any, url: str, folder: Path):
        self.fs, self.url, self.mine = fs, url, folder / NAME
        self.where = f"{url}/{NAME}"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        self.who = {"host": socket.gethostname(), "pid": os.getpid(), "started": now}
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        self._take()
        self.mine.write_text(self._text(0), "utf-8")
        threading.Thread(target=self._beat, name="bucket lock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        with contextlib.suppress(Exception):  # it is taken over if it stays
            if self._is_mine():
                self.fs.rm_file(self.where)

    def check(self) -> None:
        """Raises Lost if the lock is another's, who waited for ours in vain."""
        if not self._is_mine():
            holder = describe(read(self.fs, self.where))
            raise Lost(
                f"{self.url} was taken over by another run ({holder}): this one ends, "
                "and copies no more"
            )

    def _is_mine(self) -> bool:
        return holder(read(self.fs, self.where)) == self.who

    def _text(self, beat: int) -> str:
        return json.dumps({**self.who, "beat": beat}) + "\n"

    def _take(self) -> None:
        seen, since = "", time.monotonic()
        while not self._create():
            there = read(self.fs, self.where)
            mine = self.mine.read_text("utf-8") if self.mine.exists() else ""
            if mine and holder(there) == holder(mine):
                self.fs.rm_file(self.where)  # of a process that was killed here
            elif seen and there not in ("", seen):
                raise UserError(
                    f"{self.url} is in use by another run ({describe(there)}): wait "
                    "for it, stop it, or give another --workdir"
                )
            elif there and not seen:
                say(
                    f"{self.url} is locked ({describe(there)}): taken over after "
                    f"{DEAD_SECONDS:.0f} s without a sign of life, or delete "
                    f"{self.where}"
                )
                seen, since = there, time.monotonic()
            elif there and time.monotonic() - since > DEAD_SECONDS:
                say(f"{self.where} is given up ({describe(there)}): taken over")
                self.fs.rm_file(self.where)
            else:
                time.sleep(LOOK_SECONDS)

    def _create(self) -> bool:
        """Returns whether there was no lock, and now is ours."""
        try:
            self.fs.pipe_file(self.where, self._text(0).encode(), mode="create")
        except FileExistsError:
            return self._is_mine()  # an answer that was lost on its way
        return True

    def _beat(self) -> None:
        beat = 0
        while not self.ended.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(Exception):  # the next may pass
                if self._is_mine():
                    self.fs.pipe_file(self.where, self._text(beat).encode())


def holder(text: str) -> dict[str, Any]:
    """Returns who wrote a lock, without how often; {} where it cannot be read."""
    try:
        return {name: x for name, x in json.loads(text).items() if name != "beat"}
    except (ValueError, AttributeError):
        return {}


def describe(text: str) -> str:
    """Returns who wrote a lock, in words."""
    who = holder(text)
    if not {"pid", "host", "started"} <= who.keys():
        return "another process"
    return f"process {who['pid']} on {who['host']}, started {who['started']}"
