"""A workdir on gs://: a folder of this machine, and its copy in the bucket.

A run works in the folder, below the cache's, and after each checkpoint brings the copy
up to date. A bucket renames nothing, so a checkpoint is in it once `checkpoints.json`
lists its files, with sizes and SHA-256: it is written after them, as one object.

Dims: none.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from txl_jax.checkpoint.manifest import Damaged
from txl_jax.data.remote_cache import local_root
from txl_jax.errors import UserError
from txl_jax.report.checksum import DAMAGE, verify_checksum, with_checksum
from txl_jax.report.log import say
from txl_jax.workdir import lease

SCHEME = "gs://"
INDEX = "checkpoints.json"  # also in the folder: as it was when the two were the same
CHECKPOINTS = "checkpoints"
RECORD = "record/metadata"  # what tells two checkpoints of a step apart
OWN = (INDEX, lease.NAME, "run.lock")  # of the two places, and no files of the run

Entry = dict[str, Any]  # {"folder": name, "files": {name: [bytes, SHA-256]}}

_opened: dict[Path, "Bucket"] = {}


def of(folder: Path) -> "Bucket | None":
    """Returns the bucket of a folder that `open_folder` returned, None of any other."""
    return _opened.get(folder)


def address(given: str) -> str:
    """Returns a gs:// address; raises UserError where it is none."""
    parts = given.removeprefix(SCHEME).rstrip("/").split("/")
    if not given.startswith(SCHEME) or {"", ".", ".."} & set(parts):
        raise UserError(
            f"--workdir={given!r} is neither a folder nor gs://BUCKET/FOLDER: other "
            "stores are not known"
        )
    return SCHEME + "/".join(parts)


def local_folder(url: str) -> Path:
    """Returns the folder of this machine that a workdir on gs:// is worked on in."""
    return local_root(url) / url.rpartition("/")[2]


class Bucket:
    """The copy of one workdir; all errors of the cloud become one line of UserError."""

    def __init__(self, url: str):
        self.url, self.folder = url, local_folder(url)
        self.index: dict[int, Entry] = {}  # the checkpoints that are in the bucket
        self._known: dict[str, tuple[int, int]] = {}  # files that are alike in both
        self._lease: lease.Lease | None = None
        with self._telling("reach"):
            # Here, for only buckets need it.
            import fsspec  # type: ignore[import-untyped]

            self.fs = fsspec.filesystem("gcs")

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # each version of the library raises its own kinds
            raise UserError(
                f"cannot {what} {self.url} ({one_line(error)}): check the address and "
                "the rights, and pip install gcsfs"
            ) from error

    def open(self, ours: bool) -> None:
        """Makes the folder what the bucket holds, checkpoints but for their records.

        ours: no run of this machine is in the folder. Nothing is fetched otherwise, nor
        where nobody has changed the bucket since: what could not be copied is kept.
        """
        _opened[self.folder] = self
        with self._telling("read"):
            text = self._read(INDEX) if ours else self._local_index()
            self.index = self._parse(text)
            if ours and not text:
                self._check_empty()
            if ours and text != self._local_index():
                if self._local_index():
                    say(f"{self.url} was changed elsewhere: {self.folder} is made anew")
                self._fetch(text)
        self._known = self._files()

    def _fetch(self, text: str) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "run.lock":
                path.unlink()
        (self.folder / CHECKPOINTS).mkdir()
        self.fs.invalidate_cache()
        for remote in self.fs.find(self.url, maxdepth=1):
            name = remote.rpartition("/")[2]
            if name not in OWN:
                self._get(name, self.folder / name)
        for step in self.index:
            self._local(step).mkdir()
            with contextlib.suppress(Damaged):  # whoever needs it will tell
                self._fetch_files(step, "record/", "_")
        _write(self.folder / INDEX, text)  # last: a kill before it begins again

    def _check_empty(self) -> None:
        """Refuses to begin a run where there was one."""
        self.fs.invalidate_cache()
        names = (CHECKPOINTS, "config.json")
        if any(self.fs.find(f"{self.url}/{name}") for name in names):
            raise UserError(
                f"{self.url} holds files, but no {INDEX} that lists them: it was not "
                "written by a run with this --workdir; copy it to a folder, or give "
                "another"
            )
        if self._local_index():
            raise UserError(
                f"{self.url} is empty, but {self.folder} holds a run that was copied "
                "there: bring the bucket's files back, or move that folder away to "
                "start anew"
            )

    def fetch_checkpoint(self, step: int, items: Iterable[str]) -> None:
        """Makes items of a checkpoint be in the folder, verified; raises Damaged."""
        if step in self.index and self.has(step):
            parts = [f"{item}/" for item in items]
            with self._telling("read"):
                self._fetch_files(step, "_", *parts)

    def _fetch_files(self, step: int, *beginnings: str) -> None:
        entry = self.index[step]
        for name, expected in entry["files"].items():
            path = self._local(step) / name
            if name.startswith(beginnings) and _describe(path) != expected:
                remote = f"{CHECKPOINTS}/{entry['folder']}/{name}"
                found = self._get(remote, path, expected)
                if found != expected:
                    where = f"{self.url}/{remote}"
                    raise Damaged(step, f"{where} is {found}, and was {expected}")

    def _get(self, name: str, path: Path, expected: Any = None) -> list[Any]:
        """Returns the bytes and SHA-256 of a file, which is fetched if as expected."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            self.fs.get_file(f"{self.url}/{name}", str(fresh))
        found = _describe(fresh)
        if found and expected in (None, found):
            fresh.replace(path)
        fresh.unlink(missing_ok=True)
        return found

    def forget(self, steps: Iterable[int]) -> None:
        """Lets damaged checkpoints be copied again once they are made again."""
        for step in steps:
            self.index.pop(step, None)

    def store(self, steps: list[int]) -> None:
        """Copies what is new, then the index; then deletes what it no longer lists."""
        if self._lease:
            self._lease.check()
        index = {step: self._put_checkpoint(step) for step in steps}
        self._put_files()
        self._write_index(index)
        self._clear()

    def _clear(self) -> None:
        """Deletes files of checkpoints that the index does not list."""
        kept = {
            f"{self.url}/{CHECKPOINTS}/{entry['folder']}/{name}".removeprefix(SCHEME)
            for entry in self.index.values()
            for name in entry["files"]
        }
        self.fs.invalidate_cache()
        for remote in self.fs.find(f"{self.url}/{CHECKPOINTS}"):
            if remote.lstrip("/") not in kept:
                self.fs.rm_file(remote)

    def _put_checkpoint(self, step: int) -> Entry:
        if self.has(step):
            return self.index[step]
        there = [entry["folder"] for entry in self.index.values()]
        name = str(step)
        if name in there:  # it stays until the index names the other
            name = f"{step}.again"
        folder, files = self._local(step), {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                inside = path.relative_to(folder).as_posix()
                files[inside] = _describe(path)
                remote = f"{self.url}/{CHECKPOINTS}/{name}/{inside}"
                self.fs.put_file(str(path), remote)
        return {"folder": name, "files": files}

    def store_files(self) -> None:
        """Copies the other files that changed here, such as results."""
        with self._telling("write"):
            self._put_files()

    def _put_files(self) -> None:
        for name, state in self._files().items():
            if self._known.get(name) != state:
                self.fs.put_file(str(self.folder / name), f"{self.url}/{name}")
                self._known[name] = state

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            other = name.startswith(f"{CHECKPOINTS}/") or name in OWN
            if path.is_file() and not other and path.suffix != ".tmp":
                found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the bucket's lock; raises UserError if a run elsewhere has it."""
        with contextlib.ExitStack() as stack:
            with self._telling("lock"):
                taken = lease.Lease(self.fs, self.url, self.folder)
                self._lease = stack.enter_context(taken)
                text = self._read(INDEX)
                if text != self._local_index():
                    raise UserError(
                        f"another run has just changed {self.url}: give the command "
                        "again"
                    )
                if text:
                    self._clear()  # what a run that was killed left over
                else:
                    self._write_index({})  # so that whose the files are is known
            self._known = {}
            try:
                yield
            finally:
                self._lease = None

    def _write_index(self, index: dict[int, Entry]) -> None:
        body = {"written": os.urandom(8).hex(), CHECKPOINTS: index_json(index)}
        text = json.dumps(with_checksum(body), indent=1) + "\n"
        self.fs.pipe_file(f"{self.url}/{INDEX}", text.encode())
        _write(self.folder / INDEX, text)
        self.index = index

    def _parse(self, text: str) -> dict[int, Entry]:
        try:
            body = (
                verify_checksum(json.loads(text), required=True)[CHECKPOINTS]
                if text
                else {}
            )
            return {int(step): entry for step, entry in body.items()}
        except DAMAGE as error:
            raise UserError(
                f"{self.url}/{INDEX} is damaged ({error}): bring back an older version"
            ) from error

    def _read(self, name: str) -> str:
        return lease.read(self.fs, f"{self.url}/{name}")

    def _local_index(self) -> str:
        path = self.folder / INDEX
        return path.read_text("utf-8") if path.exists() else ""

    def _local(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / str(step)

    def has(self, step: int) -> bool:
        """Returns whether the folder's checkpoint is the one in the bucket."""
        files = self.index.get(step, {"files": {}})["files"]
        return RECORD in files and files[RECORD] == _describe(
            self._local(step) / RECORD
        )


def index_json(index: dict[int, Entry]) -> dict[str, Entry]:
    """Returns the index with the keys that JSON has."""
    return {str(step): entry for step, entry in index.items()}


def one_line(error: BaseException) -> str:
    """Returns the beginning of what an exception says."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:150]


def _describe(path: Path) -> list[Any]:
    """Returns a file's bytes and SHA-256; [] if there is none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)
