"""Local files and files on gs://: paths, atomic writes and JSON.

Local paths are `pathlib.Path`. Paths on gs:// are `etils.epath.Path`, which has the
same methods and takes a tenth of a second to import.
"""

import contextlib
import errno
import importlib.util
import io
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from txl_jax.errors import UserError, refuse

# A JSON object, such as the result of a mode.
Json = dict[str, Any]
# Exceptions that reading a damaged JSON file can raise.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, SystemError, OverflowError),  # SystemError is raised in C++
)

SCHEME = "gs://"
LIBRARIES = ("gcsfs", "google.cloud.storage")


def is_remote(path: Path | str) -> bool:
    """Returns whether a path or an address is on gs://."""
    return str(path).startswith(SCHEME)


def remote_path(address: str, flag: str) -> Path:
    """Returns the `epath.Path` of an address on gs://; raises UserError."""
    parts = address.removeprefix(SCHEME).rstrip("/").split("/")
    if not is_remote(address) or {"", ".", ".."} & {*parts}:
        raise UserError(
            f"{flag}={address!r} is neither a folder nor gs://BUCKET/FOLDER: no other "
            "store is supported"
        )
    for name in LIBRARIES:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # its parent package is missing
            spec = None
        if not spec:
            raise UserError(
                f"{flag}={address!r} needs {name}: pip install 'txl_jax[gcs]'"
            )
    from etils import epath

    return cast(Path, epath.Path(SCHEME + "/".join(parts)))


def user_path(address: str, flag: str) -> Path:
    """Returns a path that a user typed, local or on gs://; raises UserError."""
    return (remote_path if "://" in address else local_path)(address, flag)


def local_path(address: str, flag: str) -> Path:
    """Returns a local path that a user typed, with ~ expanded; raises UserError."""
    path = os.path.expanduser(address)
    refuse(path[:1] == "~", f"{flag}={address!r}: no such user: give the whole path")
    return Path(path)


def is_file(path: Path) -> bool:
    """Returns whether a file exists; False also for an invalid local path."""
    return path.exists() if is_remote(path) else os.path.isfile(path)


def to_utf8(text: str, name: str, errors: str = "strict") -> bytes:
    """Returns a text or a path in UTF-8; raises UserError for half a surrogate pair."""
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise UserError(f"{name}={text!r} is not UTF-8: give another") from error


def forget_listings() -> None:
    """Makes gcsfs list folders again, in which another process may have written."""
    if "gcsfs" in sys.modules:
        from gcsfs import GCSFileSystem

        for system in GCSFileSystem._cache.values():
            system.invalidate_cache()


def absolute(path: Path) -> Path:
    """Returns the path without reference to the current folder."""
    return path if is_remote(path) else path.absolute()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.BytesIO]:
    """Yields a buffer whose content becomes a file's, whole or not at all.

    Follows links. Raises OSError with the path; before the block, if it is of a device
    or a folder, or no file can be made there.
    """
    content = io.BytesIO()
    if is_remote(path):  # an object appears complete
        yield content
        path.write_bytes(content.getvalue())
        return
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f".{secrets.token_hex(4)}.tmp")  # `path` may be long
    with naming(path):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise FileExistsError(errno.EEXIST, "not a regular file")
        fresh.touch(exist_ok=False)
        fresh.unlink()  # a signal during the block would leave it
    try:
        yield content
        with naming(path):
            fresh.write_bytes(content.getvalue())
            sync(fresh)
            fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the path to an OSError that has none, or that of a temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file with `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces a local one, whole or not at all."""
    path = Path(os.path.realpath(path))
    fresh = path.with_name(f".incomplete-{path.name}")
    try:
        for leftover in (fresh, path):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        for each in (*fresh.rglob("*"), fresh):
            sync(each)
        fresh.rename(path)
        sync(fresh.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def sync(path: Path) -> None:
    """Forces a file or folder to disk, so that it is complete before its rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def refusing_damage(
    path: Path,
    fix: str = "restore it from a backup, or delete it to continue",
    *further: type[Exception],
) -> Iterator[None]:
    """Converts OSError, DAMAGE and `further` to UserError, except PermissionError."""
    expected: tuple[type[Exception], ...] = (OSError, *DAMAGE, *further)
    try:
        yield
    except PermissionError:
        raise
    except expected as error:
        raise UserError(f"{path} is damaged ({error}): {fix}") from error
