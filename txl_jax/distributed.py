"""Several processes of one run: how they meet, wait for each other and end.

Every process runs the same command. On TPU pods (also GKE's) and under Slurm's `srun`
they find each other by themselves; elsewhere by JAX_COORDINATOR_ADDRESS (host:port of
process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, for which an indexed job's
JOB_COMPLETION_INDEX may stand. A process alone opens no connection.

Process 0 coordinates: only it writes a run's files and says what goes well.
"""

import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from txl_jax.errors import AGAIN, MENDABLE, BadNumbers, Interrupted, UserError, require

Made = TypeVar("Made")
LEAVING = threading.Lock()  # held by the thread that ends the process

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"

HEARTBEAT_SECONDS = 30  # without a sign of a process until the others end
SHUTDOWN_SECONDS = 60  # after the last wait for all, until all have ended
WAIT_SECONDS = 24 * 3600  # for what process 0 does alone, such as preparing data
FAREWELL_SECONDS = 3  # that process 0 outlives its failure: its end aborts the others


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run lives on its machines; no number depends on it."""

    connect_seconds: int = 300  # at the start, for all processes to meet
    hang_seconds: int = 1_800  # without an update or a segment until it ends; 0 = never
    compilation_cache: str = ""  # folder, also gs://, that keeps programs; "" = none
    profile_steps: str = ""  # "10:15" traces updates 11 to 15 into WORKDIR/profile
    tensorboard: bool = True  # write metrics.jsonl also as WORKDIR/tensorboard

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "run", 1, "connect_seconds")
        require(self, "run", 0, "hang_seconds")
        if self.profile_steps:
            first, _, last = self.profile_steps.partition(":")
            if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
                raise UserError(
                    f"run.profile_steps = {self.profile_steps!r} is no range of "
                    'updates: write it as "10:15"'
                )

    def profiled(self) -> tuple[int, int]:
        """Returns the updates before the trace and at its end; (-1, -1) for none."""
        first, _, last = self.profile_steps.partition(":")
        return (int(first), int(last)) if last else (-1, -1)


def find_processes(environment: Mapping[str, str], on_tpu: bool) -> dict[str, object]:
    """Returns what `jax.distributed.initialize` is to be told, or {} for one process.

    Raises UserError for an environment that says only a part.
    """
    index = environment.get(INDEX, environment.get("JOB_COMPLETION_INDEX"))
    given = {
        ADDRESS: environment.get(ADDRESS),
        COUNT: environment.get(COUNT),
        INDEX: index,
    }
    if given[COUNT] is not None:
        if given[COUNT] == "1":
            return {}
        if missing := [name for name, value in given.items() if not value]:
            raise UserError(f"{COUNT} is set without {missing[0]}: set all three")
        for name in (COUNT, INDEX):
            if not str(given[name]).isdecimal():
                raise UserError(f"{name} = {given[name]!r} must be a whole number")
        if int(str(index)) >= int(str(given[COUNT])):
            raise UserError(f"{INDEX} = {index} must be below {COUNT} = {given[COUNT]}")
        if ":" not in str(given[ADDRESS]):
            raise UserError(f"{ADDRESS} = {given[ADDRESS]!r} must be host:port")
        return {
            "coordinator_address": given[ADDRESS],
            "num_processes": int(str(given[COUNT])),
            "process_id": int(str(index)),
            "cluster_detection_method": "deactivate",
        }
    # srun tells its steps; a shell inside an allocation is one process.
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return {"cluster_detection_method": "slurm"}
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "?,?").count(",") + 1
    slices = int(environment.get("MEGASCALE_NUM_SLICES", 1))
    if on_tpu and hosts * slices > 1:
        return {"cluster_detection_method": None}
    return {}


def find_others() -> dict[str, object]:
    """Returns what `find_processes` does, of this process."""
    # jax's import sets this on a machine with TPUs.
    on_tpu = (
        "TPU_ML_PLATFORM" in os.environ and os.environ.get("JAX_PLATFORMS") != "cpu"
    )
    return find_processes(os.environ, on_tpu)


def connect(wait_seconds: int) -> None:
    """Meets the other processes, if there are any, before jax is first used.

    A process that has not met all of them after wait_seconds says so and ends with
    status AGAIN. Raises UserError for an environment that says only a part.
    """
    found = find_others()
    if not found:
        return
    where = found.get("coordinator_address", "their coordinator")
    line = (
        f"txl_jax[{found.get('process_id', '?')}]: not all processes met at {where} "
        f"within run.connect_seconds = {wait_seconds} s: start all of them, with the "
        f"same {ADDRESS} and {COUNT}"
    )
    # jax's own way out is an abort with a C++ stack: it comes after ours.
    timer = threading.Timer(wait_seconds, _give_up, [line])
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        initialization_timeout=wait_seconds + 60,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        **found,  # type: ignore[arg-type]
    )
    # From here on all know each other's devices, and can add up over them: on CPUs this
    # first time takes no longer than 30 s, and the next may be after compiling, which
    # takes some processes longer than others.
    multihost_utils.sync_global_devices("txl_jax")
    timer.cancel()


def several() -> bool:
    """Returns whether the run has other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this is the process that writes and talks."""
    return not several() or jax.process_index() == 0


def label() -> str:
    """Returns what a process's last line begins with, such as "txl_jax[1]"."""
    return f"txl_jax[{jax.process_index()}]" if several() else "txl_jax"


def first_then_others(make: Callable[[], Made]) -> Made:
    """Returns make() of each process; process 0's is over before the others begin.

    What it leaves on a shared disk they find; on a disk of their own they make it.
    """
    if not is_first():
        wait_for_all()
        return make()
    try:
        return make()
    finally:  # also where it fails, so that the others meet the failure themselves
        wait_for_all()


def wait_for_all() -> None:
    """Returns when all processes have called this as often."""
    if several():
        wait = multihost.get_barrier_sync_fn()
        wait(key="txl_jax", timeout_ms=1000 * WAIT_SECONDS)


# What the loss of a process looks like from another: of gloo, gRPC and jax's service.
LOST = (
    "closed by peer",
    "reset by peer",
    "Connection refused",
    "Broken pipe",
    "Gloo",
    "heartbeat",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "Barrier",
    "another task died",
)


def fail(kind: object, error: BaseException | None, _: object) -> None:
    """Ends one process of several at once after an exception, as an `__exit__`.

    Any other way out would wait for the others, and jax would abort it for that.
    Returns where the end is agreed or all processes see why.
    """
    if (
        error is None
        or isinstance(error, (Interrupted, UserError, BadNumbers))
        or not several()
    ):
        return
    text = "".join(traceback.format_exception(error))
    if any(sign in text for sign in LOST):
        reason = str(error).strip().partition("\n")[0][:200]
        line = f"another process is lost ({reason}); the same command goes on"
        leave(line, AGAIN)
    *rest, last = text.splitlines()
    for line in rest:
        warn(line)
    leave(last, 1)


def say_why(error: UserError | Interrupted | BadNumbers) -> int:
    """Prints why the run ends, and returns its status.

    One process of several that ends alone does so here and now.
    """
    if isinstance(error, Interrupted | BadNumbers):  # all of them do
        if is_first():
            print(f"txl_jax: {error}", file=sys.stderr)
        return error.status
    if several():
        leave(str(error), MENDABLE)
    print(f"txl_jax: {error}", file=sys.stderr)
    return MENDABLE


def warn(line: str) -> None:
    """Prints a line of this process, whichever it is, from any thread."""
    _write(f"{label()}: {line}")


def leave(line: str, status: int) -> NoReturn:
    """Ends the process at once with a last line, from any thread: the first alone."""
    LEAVING.acquire()  # for good
    warn(line)
    if several() and is_first():
        time.sleep(FAREWELL_SECONDS)
    os._exit(status)


def _write(line: str) -> None:
    # Not through sys.stderr: who holds its lock may be what hangs.
    os.write(2, f"{line}\n".encode())


def _give_up(line: str) -> NoReturn:
    _write(line)
    os._exit(AGAIN)
