"""The entry of `txl` and of the programs in experiments/: streams, signals, status."""

import io
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version

from txl_jax.errors import BROKEN_PIPE, USER_ERROR, Ending, UserError
from txl_jax.runtime import allocator

LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # jax sets it to 1 unless it is set
# Values of jax's environment variables with which parts of the programs fail.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "jax_enable_x64": (True,),
    "jax_disable_jit": (True,),
    "jax_numpy_rank_promotion": ("raise",),
    "jax_numpy_dtype_promotion": ("strict",),
    "jax_transfer_guard": ("disallow", "disallow_explicit"),
}


def run(work: Callable[[], tuple[int, str]], is_program: bool) -> int:
    """Prints the text that the work returns, and returns its exit status.

    An error that a user can fix is one line on stderr. A program ends quietly if the
    reader of stdout has gone.
    """
    if is_program:
        prepare_process()
    text = ""
    try:
        status, text = work()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except Ending as error:
        status = report(error)
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes again
        if isinstance(error, BrokenPipeError):
            return status or BROKEN_PIPE
        print(f"txl_jax: stdout: {error.strerror}", file=sys.stderr)
        return status or USER_ERROR
    return status


def report(error: Ending) -> int:
    """Prints why the program ends, and returns its exit status."""
    if "txl_jax.runtime.distributed" in sys.modules:  # importing jax takes seconds
        from txl_jax.runtime import distributed

        return distributed.report(error)
    print(f"txl_jax: {error}", file=sys.stderr)
    return error.status


def prepare_process() -> None:
    """Sets the streams, signals and libraries of a program."""
    # If a standard stream is closed (`2>&-`), the next file that is opened takes its
    # number.
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="backslashreplace"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    allocator.keep_freed()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also ends C++ code
    os.environ["MPLBACKEND"] = "agg"  # pictures are files
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow's file system
    if version("jaxlib") == "0.10.1" and os.environ.get(LOG_LEVEL, "1") == "1":
        # It prints errors about programs from the cache, which run all the same.
        os.environ[LOG_LEVEL] = "3"


def import_jax() -> None:
    """Imports jax, which takes seconds; raises UserError if the environment forbids."""
    try:
        import jax
    except ValueError as error:
        raise UserError(
            f"jax cannot be imported ({error}): correct the environment"
        ) from error
    for name, values in UNSUPPORTED.items():
        if (value := jax.config.values[name]) in values:
            raise UserError(f"{name.upper()}={value} is not supported: unset it")
