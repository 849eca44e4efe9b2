"""Local files and files on gs://: paths, atomic writes, JSON and errors.

Local paths are `pathlib.Path`. Paths on gs:// are `etils.epath.Path`, which has the
same methods and takes a tenth of a second to import.
"""

import contextlib
import errno
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from txl_jax.errors import UserError

# A JSON object, such as the result of a mode.
Json = dict[str, Any]
# Exceptions that reading a damaged JSON file can raise.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, OverflowError),
)

SCHEME = "gs://"
LIBRARIES = ("gcsfs", "google.cloud.storage")
# Words in their errors, and in TensorStore's, when a store cannot be reached.
UNREACHABLE = (
    *("PermissionError", "PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden"),
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "Cannot connect", "CURL error"),
)


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
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # its parent package is missing
            found = None
        if not found:
            raise UserError(
                f"{flag}={address!r} needs {name}: pip install 'txl_jax[gcs]'"
            )
    from etils import epath

    return cast(Path, epath.Path(SCHEME + "/".join(parts)))


def user_path(address: str, flag: str) -> Path:
    """Returns the path of a file of the user, local or on gs://; raises UserError."""
    if is_remote(address):
        return remote_path(address, flag)
    return Path(address).expanduser()


def is_file(path: Path) -> bool:
    """Returns whether a file exists; False also for an invalid local path."""
    return path.exists() if is_remote(path) else os.path.isfile(path)


def to_utf8(text: str, name: str, errors: str = "strict") -> bytes:
    """Returns a text or a path in UTF-8; raises UserError for half a surrogate pair."""
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise UserError(f"{name}={text!r} is not UTF-8: give another") from error


def absolute(path: Path) -> Path:
    """Returns the path without reference to the current folder."""
    return path if is_remote(path) else path.absolute()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it appears complete, as each object on gs:// does."""
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(data)
        return
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)  # a link, which would be followed
    try:
        fresh.write_bytes(data)
        sync(fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)  # after a failed write


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
    *more: type[Exception],
) -> Iterator[None]:
    """Converts OSError, DAMAGE and `more` to UserError, except PermissionError."""
    kinds: tuple[type[Exception], ...] = (OSError, *DAMAGE, *more)
    try:
        yield
    except PermissionError:
        raise
    except kinds as error:
        raise UserError(f"{path} is damaged ({error}): {fix}") from error


def errors() -> tuple[type[Exception], ...]:
    """Returns OSError and the libraries' exceptions, for an `except` clause."""
    if "gcsfs" not in sys.modules:  # it reads and writes all paths on gs://
        return (OSError,)
    from gcsfs.retry import RETRIABLE_EXCEPTIONS, HttpError
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    retried = RETRIABLE_EXCEPTIONS  # from network libraries, after all attempts
    return OSError, *retried, HttpError, GoogleAPIError, GoogleAuthError


# Errors that no change to the program would prevent.
OF_THE_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE),
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)


def place(error: OSError) -> str | None:
    """Returns the path that could not be used: for a rename, the target."""
    return error.filename2 or error.filename


def machine_error(error: BaseException) -> str:
    """Returns the message if a local disk or its permissions failed, else ""."""
    if not isinstance(error, OSError):
        return ""
    where = place(error) or "the disk or stdout"
    is_broken_link = error.errno == errno.ENOENT and os.path.islink(where)
    if error.errno not in OF_THE_MACHINE and not is_broken_link:
        return ""
    return f"cannot use {where} ({error.strerror}): fix this and run the command again"


def one_line(error: BaseException) -> str:
    """Returns the start of an error's message, after the reason in TensorStore's."""
    text = str(error)
    array = re.search(r"""path\\?['"]: ?\\?['"]([^/'"\\]+)/\\?['"]""", text)
    system = re.search(r": ([^:\[]+) \[os_error_code=", text)
    parts = [f"array {array[1]}"] if array else []
    parts += [system[1]] if system else []
    first = f"{type(error).__name__}: {text}".splitlines()[0]
    return ": ".join([*parts, first[: 80 if parts else 150]])
