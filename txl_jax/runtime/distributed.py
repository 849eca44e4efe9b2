"""The processes of a run: connection, barriers and termination.

Every process runs the same command. On TPU pods (including GKE's) and under Slurm's
`srun` they find each other; elsewhere JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID connect them, or JOB_COMPLETION_INDEX of an indexed
job instead of JAX_PROCESS_ID. A single process opens no connection.

Process 0 is the coordinator: it alone writes a run's files and reports progress.
"""

import contextlib
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # orbax uses it, too
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from txl_jax.errors import (
    BROKEN_PIPE,
    RETRY,
    USER_ERROR,
    BadNumbers,
    Interrupted,
    UserError,
    out_of_memory,
)
from txl_jax.runtime import roll_call, storage

Result = TypeVar("Result")
EXITING = threading.Lock()  # held by the thread that ends the process
# Called with the exit status; of process 0, they return when the others have ended.
before_exit: list[Callable[[int], None]] = []

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
# What srun sets for each task of a step, and jax reads.
TASKS, NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
SLICES = "MEGASCALE_NUM_SLICES"
SLURM = (NODES, *(f"SLURM_{x}" for x in ("JOB_ID", "NTASKS", "PROCID", "LOCALID")))

CONNECT_SECONDS = 300  # until all processes must have connected
HEARTBEAT_SECONDS = 30  # from a process's last heartbeat until the others exit
SHUTDOWN_SECONDS = 60  # from the last barrier until all processes have ended
WAIT_SECONDS = 24 * 3600  # for the work of process 0 alone, such as preparing data

# Texts by which gloo, gRPC and jax's coordination service report a lost process.
LOST = (
    *("closed by peer", "reset by peer", "Connection refused", "Broken pipe", "Gloo"),
    *("heartbeat", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Barrier", "another task died"),
)


def find_processes(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize`, {} for one process.

    Raises UserError if the variables are incomplete or invalid.
    """
    count = environment.get(COUNT)
    if count == "1":
        return {}
    if count is not None:
        address = environment.get(ADDRESS, "")
        index = environment.get(INDEX, environment.get("JOB_COMPLETION_INDEX", ""))
        for name, value in ((COUNT, count), (ADDRESS, address), (INDEX, index)):
            if not value and name != COUNT:
                raise UserError(f"{COUNT} is set without {name}: set all three")
            if name != ADDRESS:
                _whole(name, value)
        if int(index) >= int(count):
            raise UserError(f"{INDEX} = {index} must be below {COUNT} = {count}")
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise UserError(f"{ADDRESS} = {address!r} must be host:port")
        return {
            "coordinator_address": address,
            "num_processes": int(count),
            "process_id": int(index),
            "cluster_detection_method": "deactivate",
        }
    if _in_slurm_step(environment):
        return {"cluster_detection_method": "slurm"}
    # The import of jax sets the variable on a machine with TPUs.
    on_tpu = "TPU_ML_PLATFORM" in environment
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "?,?").count(",") + 1
    slices = _whole(SLICES, environment.get(SLICES, "1"))
    if on_tpu and environment.get("JAX_PLATFORMS") != "cpu" and hosts * slices > 1:
        return {"cluster_detection_method": None}
    return {}


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Returns whether srun started several processes; a batch script is one."""
    several = _whole(TASKS, environment.get(TASKS, "1")) > 1
    for name in SLURM if several else ():
        if not (value := environment.get(name)):
            fix = "start with srun, or unset it"
            raise UserError(f"{TASKS} is set without {name}: {fix}")
        if name != NODES:
            _whole(name, value)
    return several


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UserError(
            f"{name} = {value!r} must be a whole number: correct it, or unset it"
        )
    return int(value)


def connect(wait_seconds: int = CONNECT_SECONDS) -> None:
    """Connects to the other processes, if there are any; must precede any use of jax.

    If not all processes connect within wait_seconds, each exits with one line and
    status RETRY. Raises UserError like `find_processes` and `roll_call.attend`.
    """
    args = find_processes()
    if not args:
        return

    def give_up() -> NoReturn:
        _write(
            f"txl_jax[{args.get('process_id', '?')}]: not all processes connected to "
            f"{args.get('coordinator_address', 'their coordinator')} within "
            f"{wait_seconds} s: start all of them, with the same {ADDRESS} and {COUNT}"
        )
        os._exit(RETRY)

    # The timeout of jax itself would abort with a C++ stack, so it comes later.
    timer = threading.Timer(wait_seconds, give_up)
    timer.daemon = True
    timer.start()
    if address := args.get("coordinator_address"):
        count, index = args["num_processes"], args["process_id"]
        roll_call.attend(address, count, index, wait_seconds)
    jax.distributed.initialize(
        initialization_timeout=wait_seconds + 60,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        **args,
    )
    timer.cancel()


def refuse() -> None:
    """Tells the other processes, if they can be found, that this one will not run."""
    with contextlib.suppress(UserError):
        args = find_processes()
        if address := args.get("coordinator_address"):
            count, index = args["num_processes"], args["process_id"]
            roll_call.attend(address, count, index, CONNECT_SECONDS, refuses=True)


def find_devices() -> None:
    """Finds the devices of all processes; raises UserError if this one has none."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter has no message
        reason = storage.one_line(error) if str(error) else "none of its kind is here"
        raise UserError(f"no device ({reason}): check JAX_PLATFORMS") from error
    if several():
        wait_for_all()  # see there
        multihost_utils.sync_global_devices("txl_jax")


def several() -> bool:
    """Returns whether the run has several processes; needs no devices."""
    return jax.distributed.is_initialized() and global_state.num_processes > 1


def is_first() -> bool:
    """Returns whether this process writes files and reports progress."""
    return not several() or jax.process_index() == 0


def first_then_others(make: Callable[[], Result]) -> Result:
    """Returns make(), which every process calls, the others after process 0.

    On a shared disk the others find the files of process 0.
    """
    if not is_first():
        wait_for_all()
    try:
        return make()
    finally:  # also after an error, which the others then raise themselves
        if is_first():
            wait_for_all()


def gather(values: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, stacked; every process calls this."""
    if not several():
        return values[None]
    wait_for_all()  # see there
    return np.asarray(multihost_utils.process_allgather(values))


def anywhere(condition: bool) -> bool:
    """Returns whether the condition holds in any process; every process calls this."""
    return bool(gather(np.array(condition)).any())


def differs(value: Any) -> bool:
    """Returns whether a value differs between processes; every process calls this."""
    own = np.array(zlib.crc32(repr(value).encode()), np.uint32)
    return len(np.unique(gather(own))) > 1


def require_equal(values: Mapping[str, Any]) -> None:
    """Raises UserError in all processes if a value differs between them.

    All processes must call this with the same names.
    """
    own = [zlib.crc32(repr(value).encode()) for value in values.values()]
    all_PN = gather(np.array(own, np.uint32))
    for name, all_P in zip(values, all_PN.T, strict=True):
        if other := np.flatnonzero(all_P != all_P[0]).tolist():
            raise UserError(
                f"{name} of process {other[0]} differs from that of process 0 (here it "
                f"is {values[name]!r}): start all processes with the same command"
            )


@contextlib.contextmanager
def together(*errors: type[Exception]) -> Iterator[None]:
    """Raises an error in all processes if the block raises one of `errors` in any.

    A UserError of any process is raised as one in all of them.
    """
    kinds: tuple[type[Exception], ...] = (UserError, *errors)
    raised: Exception | None = None
    try:
        yield
    except kinds as error:
        raised = error
    if anywhere(isinstance(raised, UserError)):
        if not isinstance(raised, UserError):
            raised = UserError("another process has an error")
        raise raised
    if anywhere(raised is not None):
        raise raised or OSError("another process cannot write")


def wait_for_all() -> None:
    """Waits until every process has made this call as many times.

    Must precede the first call of a program with collectives, after its compilation:
    devices of CPUs that communicate for the first time wait 30 s for one another.
    """
    if several():
        wait = multihost.get_barrier_sync_fn()
        wait(key="txl_jax", timeout_ms=1000 * WAIT_SECONDS)


def exit_on_error(
    kind: object, error: BaseException | None, _: object, mode: str = "train"
) -> None:
    """An `__exit__` that ends one of several processes immediately after an exception.

    A normal exit would wait for the others, and jax would abort it. Exceptions that all
    processes raise together pass.
    """
    raised_by_all = isinstance(error, (Interrupted, UserError, BadNumbers))
    if error is None or raised_by_all or not several():
        return
    if isinstance(error, BrokenPipeError):
        exit_now("", BROKEN_PIPE)
    text = "".join(traceback.format_exception(error))
    if any(reason in text for reason in LOST):
        reason = str(error).strip().partition("\n")[0][:200]
        exit_now(f"another process is lost ({reason}); the same command resumes", RETRY)
    if line := storage.machine_error(error) or out_of_memory(error, mode):
        exit_now(line, USER_ERROR)
    *rest, last = text.splitlines()
    for line in rest:
        warn(line)
    exit_now(last, 1)


def report(error: UserError | Interrupted | BadNumbers) -> int:
    """Prints why the run ends, and returns its exit status.

    A UserError may concern only one of several processes: that process exits here.
    """
    if isinstance(error, UserError) and several():
        exit_now(str(error), USER_ERROR)
    if is_first():
        print(f"txl_jax: {error}", file=sys.stderr)
    return error.status


def warn(line: str) -> None:
    """Prints a line from any process and any thread."""
    index = f"[{global_state.process_id}]" if several() else ""
    _write(f"txl_jax{index}: {line}")


def _write(line: str) -> None:
    # A hanging thread may hold the lock of sys.stderr.
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def exit_now(line: str, status: int) -> NoReturn:
    """Prints a line and exits at once, from any thread; later calls never return."""
    EXITING.acquire()  # never released
    if line:
        warn(line)
    for tell in before_exit:
        tell(status)
    os._exit(status)
