"""The processes of a run: connection, barriers and termination.

Every process runs the same command. On TPU pods, GKE and under Slurm's `srun`, jax
finds the others; elsewhere ADDRESS (host:port of process 0), COUNT and INDEX describe
them, or JOB_COMPLETION_INDEX of an indexed job instead of INDEX. Process 0 alone writes
a run's files and reports progress. When a process dies, jax's coordination service ends
the others soon after HEARTBEAT_SECONDS.
"""

import contextlib
import os
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from txl_jax.errors import (
    BROKEN_PIPE,
    RETRY,
    USER_ERROR,
    Ending,
    UserError,
)
from txl_jax.runtime.explain import one_line

Result = TypeVar("Result")

ADDRESS, COUNT = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"

CONNECT_SECONDS = 300  # until all processes must have connected
HEARTBEAT_SECONDS = 30  # from a process's last heartbeat until jax counts it as lost
ERROR_SECONDS = 30  # for the other processes to report a user error as well
SHUTDOWN_SECONDS = 60  # from the last barrier until all processes have ended
WAIT_SECONDS = 24 * 3600  # for the work of process 0 alone, such as preparing data

# Texts by which gloo, gRPC and jax's coordination service report a lost process.
LOST = (
    *("closed by peer", "reset by peer", "Connection refused", "Broken pipe", "Gloo"),
    *("heartbeat", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Barrier", "another task died"),
)


def connect(wait_seconds: int = CONNECT_SECONDS) -> None:
    """Connects to the other processes, if there are any; must precede any use of jax.

    Raises UserError; exits with RETRY if not all connect within wait_seconds.
    """
    count, address = os.environ.get(COUNT, ""), os.environ.get(ADDRESS, "")
    if count == "1":
        return
    port = address.rpartition(":")[2]
    if address and not (port.isdecimal() and 0 < int(port) < 2**16):  # jax would abort
        raise UserError(f"{ADDRESS} = {address!r} must be host:port")
    alone = f"or set {COUNT}=1 to run alone"

    def give_up() -> NoReturn:
        _write(
            f"txl_jax: not all processes connected within {wait_seconds} s: start all "
            f"of them, each {INDEX} once, with the same {ADDRESS} and {COUNT}, {alone}"
        )
        os._exit(RETRY)

    # jax's own timeout is longer, because it would abort with a C++ stack trace.
    timer = threading.Timer(wait_seconds, give_up)
    timer.daemon = True
    timer.start()
    stated: dict[str, Any] = {}
    try:
        if count:
            index = os.environ.get(INDEX) or os.environ.get("JOB_COMPLETION_INDEX", "")
            stated = {"num_processes": int(count), "process_id": int(index)}
            stated["cluster_detection_method"] = "deactivate"
        with warnings.catch_warnings(action="ignore"):  # advice for Kubernetes
            jax.distributed.initialize(
                initialization_timeout=wait_seconds + 60,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                **stated,
            )
    except Exception as error:
        if str(error).startswith("coordinator_address should") and not count:
            return  # no cluster
        raise UserError(
            f"cannot find the other processes ({one_line(error)}): set "
            f"{ADDRESS}, {COUNT} and {INDEX}, {alone}"
        ) from error
    finally:
        timer.cancel()


def find_devices() -> None:
    """Finds the devices of all processes; raises UserError if this one has none."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter has no message
        reason = one_line(error) if str(error) else "none of its kind is here"
        line = f"no device ({reason}): check JAX_PLATFORMS"
        if jax.distributed.is_initialized():
            _write(f"txl_jax: {line}")
            os._exit(USER_ERROR)
        raise UserError(line) from error
    if several():
        wait_for_all()  # see its docstring
        multihost_utils.sync_global_devices("txl_jax")


def several() -> bool:
    """Returns whether the run has several processes; finds the devices if so."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this process writes files and reports progress."""
    return not several() or jax.process_index() == 0


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """Runs the block in process 0, then in the others, which find its files."""
    if not is_first():
        wait_for_all()
    try:
        yield
    finally:  # also after an error, which the others then raise themselves
        if is_first():
            wait_for_all()


def gather(values: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, stacked; every process calls this."""
    if not several():
        return values[None]
    wait_for_all()  # see its docstring
    return np.asarray(multihost_utils.process_allgather(values))


def anywhere(condition: bool) -> bool:
    """Returns whether the condition holds in any process; every process calls this."""
    return bool(gather(np.array(condition)).any())


def differing(values: Mapping[str, object]) -> dict[str, int]:
    """Returns {name of a value: a process in which it differs from process 0's}."""
    hashes = [zlib.crc32(repr(value).encode()) for value in values.values()]
    all_PN = gather(np.array(hashes, np.uint32))
    others = (np.flatnonzero(all_P != all_P[0]).tolist() for all_P in all_PN.T)
    return {name: other[0] for name, other in zip(values, others, strict=True) if other}


def require_equal(values: Mapping[str, object]) -> None:
    """Raises UserError in all processes if a value differs between them."""
    for name, other in differing(values).items():
        raise UserError(
            f"{name} differs between process {other} and process 0 (here it is "
            f"{values[name]!r}): start all processes with the same command"
        )


@contextlib.contextmanager
def together(*errors: type[Exception]) -> Iterator[None]:
    """If any process raises a UserError or one of `errors`, raises it in all."""
    expected: tuple[type[Exception], ...] = (UserError, *errors)
    raised: Exception | None = None
    try:
        yield
    except expected as error:
        raised = error
    if anywhere(isinstance(raised, UserError)):
        if not isinstance(raised, UserError):
            raised = UserError("another process has an error")
        raise raised
    if anywhere(raised is not None):
        raise raised or OSError("another process cannot write")


def wait_for_all() -> None:
    """Waits until every process has called this equally often.

    Must precede the first call of a program with collectives, after its compilation:
    CPU devices that communicate for the first time wait 30 s for one another.
    """
    _barrier("txl_jax", WAIT_SECONDS)


def _barrier(key: str, seconds: int) -> None:
    if several():
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * seconds)


def exit_on_error(_: object, error: BaseException | None, __: object) -> None:
    """An `__exit__` that ends one of several processes at once after an exception.

    A normal exit would wait for the others. Exceptions that all raise together pass.
    """
    if error is None or isinstance(error, Ending) or not several():
        return
    if isinstance(error, BrokenPipeError):
        exit_now("", BROKEN_PIPE)
    text = "".join(traceback.format_exception(error))
    if any(reason in text for reason in LOST):
        reason = str(error).strip().partition("\n")[0][:200]
        exit_now(f"another process is lost ({reason}); the same command resumes", RETRY)
    *rest, last = text.splitlines()
    for line in rest:
        warn(line)
    exit_now(last, 1)


def report(error: Ending) -> int:
    """Prints why the run ends, and returns its exit status.

    A UserError may concern only one of several processes: that process exits here.
    Otherwise process 0 must not exit before the others, which jax would then abort.
    """
    if isinstance(error, UserError) and several():
        warn(str(error))
        try:
            _barrier("txl_jax/error", ERROR_SECONDS)
        except jax.errors.JaxRuntimeError:
            exit_now("", USER_ERROR)
    elif is_first():
        print(f"txl_jax: {error}", file=sys.stderr)
    return error.status


def warn(line: str) -> None:
    """Prints a line from any process."""
    index = f"[{jax.process_index()}]" if several() else ""
    _write(f"txl_jax{index}: {line}")


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def exit_now(line: str, status: int) -> NoReturn:
    """Prints a line and exits at once."""
    if line:
        warn(line)
    os._exit(status)
