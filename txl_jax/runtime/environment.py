"""How the processes of a run find each other, as their environment says.

On TPU pods (including GKE's) and under Slurm's `srun` they find each other; elsewhere
JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID
connect them, or JOB_COMPLETION_INDEX of an indexed job instead of JAX_PROCESS_ID.
"""

import os
from collections.abc import Mapping
from typing import TypedDict

from txl_jax.errors import UserError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
SLICES = "MEGASCALE_NUM_SLICES"
TASKS, NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
# With TASKS, what jax reads under Slurm.
SLURM = (NODES, *(f"SLURM_{x}" for x in ("JOB_ID", "NTASKS", "PROCID", "LOCALID")))


class Connection(TypedDict, total=False):
    """Arguments of `jax.distributed.initialize`; empty for a single process."""

    coordinator_address: str
    num_processes: int
    process_id: int
    cluster_detection_method: str | None


def find_processes(environment: Mapping[str, str] = os.environ) -> Connection:
    """Returns how this process connects to the others; raises UserError."""
    if COUNT in environment:
        return _named(environment)
    if _in_slurm_step(environment):
        return {"cluster_detection_method": "slurm"}
    # The import of jax sets the variable on a machine with TPUs.
    on_tpu = "TPU_ML_PLATFORM" in environment
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "?,?").count(",") + 1
    slices = _whole(SLICES, environment.get(SLICES, "1"))
    if on_tpu and environment.get("JAX_PLATFORMS") != "cpu" and hosts * slices > 1:
        return {"cluster_detection_method": None}
    return {}


def _named(environment: Mapping[str, str]) -> Connection:
    """Returns the connection that the three variables describe."""
    count, address = environment[COUNT], environment.get(ADDRESS, "")
    if count == "1":
        return {}
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
