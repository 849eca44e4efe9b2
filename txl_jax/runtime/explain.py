"""Explains errors of the machine, which no change to the program would prevent."""

import errno
import os
import re
import sys

# Errors of a local disk, or of the rights to use it.
OF_THE_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE),
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)

# Words in errors of gcsfs and TensorStore when a store cannot be reached.
UNREACHABLE = (
    *("PermissionError", "PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden"),
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "Cannot connect", "CURL error"),
)

_TRAINING = (
    "lower train.batch_size or train.gradient_segments, raise train.batch_chunk or "
    "mesh.fsdp, or set model.remat_policy=full or model.kernel=chunked"
)
# How to reduce memory, by mode.
SAVINGS = {
    "train": _TRAINING,
    "table": _TRAINING,
    "generate": "lower generate.mem_len or generate.samples",
    "evaluate": "lower eval.streams, eval.mem_len, eval.tgt_len, "
    "eval.segments_per_step or eval.cache_len",
    "speed": "lower eval.streams, eval.tgt_len or the lengths of eval.sweep",
    "": "choose a smaller model or less data at a time",  # programs in experiments/
}


def explain(error: BaseException, mode: str = "") -> str | None:
    """Returns a line for the user if a device, a disk or gs:// failed, else None."""
    if isinstance(error, (RuntimeError, MemoryError)):  # JaxRuntimeError is the first
        return _explain_device(error, mode)
    if isinstance(error, storage_errors()) and not isinstance(error, BrokenPipeError):
        return _explain_storage(error)
    return None


def _explain_device(error: BaseException, mode: str) -> str | None:
    reason = str(error).partition("\n")[0][:200] or type(error).__name__
    exhausted = "RESOURCE_EXHAUSTED" in reason or "out of memory" in reason.lower()
    if exhausted or isinstance(error, MemoryError):
        default = "lower eval.mem_len or eval.tgt_len"
        return f"out of memory ({reason}): {SAVINGS.get(mode, default)}"
    if re.search("cudnn|cuda_dnn|dnn library", str(error), re.IGNORECASE):
        return f"cuDNN fails ({reason}): set model.kernel to xla or chunked"
    return None


def _explain_storage(error: BaseException) -> str | None:
    path = None
    if isinstance(error, OSError):
        path = failed_path(error)
        where = path or "the disk or stdout"
        folder = os.path.dirname(where) or "."
        is_lost = os.path.islink(where) or not os.path.isdir(folder)
        if error.errno in OF_THE_DISK or (error.errno == errno.ENOENT and is_lost):
            reason = error.strerror
            return f"cannot use {where} ({reason}): fix this and run the command again"
    if path or "gcsfs" not in sys.modules:  # which reads and writes all of gs://
        return None
    return (
        f"cannot reach gs:// ({one_line(error)}): check the address, the "
        "permissions and the network"
    )


def storage_errors() -> tuple[type[Exception], ...]:
    """Returns OSError and the libraries' exceptions, for an `except` clause."""
    if "gcsfs" not in sys.modules:  # it reads and writes all paths on gs://
        return (OSError,)
    from gcsfs.retry import RETRIABLE_EXCEPTIONS, HttpError
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    retried = RETRIABLE_EXCEPTIONS  # from network libraries, after all attempts
    return OSError, *retried, HttpError, GoogleAPIError, GoogleAuthError


def failed_path(error: OSError) -> str | None:
    """Returns the path that could not be used: for a rename, the target."""
    return error.filename2 or error.filename


def one_line(error: BaseException) -> str:
    """Returns one line: TensorStore's array and cause, if any, and the message."""
    text = str(error)
    array = re.search(r"""path\\?['"]: ?\\?['"]([^/'"\\]+)/\\?['"]""", text)
    system = re.search(r": ([^:\[]+) \[os_error_code=", text)
    parts = [f"array {array[1]}"] if array else []
    parts += [system[1]] if system else []
    first = f"{type(error).__name__}: {text}".splitlines()[0]
    return ": ".join([*parts, first[: 80 if parts else 150]])
