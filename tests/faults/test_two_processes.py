"""Failed saves of two processes: both report the failure, and neither waits."""

from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.store import remote, shared_store, store

FIXTURES = remote, shared_store, store

# Process 0 loses the folder in step 2, and cannot write its part of step 4; process 1
# cannot write its part of step 3. A barrier that one of them does not reach would end
# by no timeout.
SAVES = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from absl import logging
from txl_jax.runtime import distributed

distributed.connect()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from orbax.checkpoint._src.multihost import multihost as timeouts
from tests.faults.test_disk import full_disk, lost_disk
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig

logging.set_verbosity(logging.FATAL)
timeouts.coordination_timeout = lambda: 10**6
meet = multihost.get_barrier_sync_fn()
multihost.get_barrier_sync_fn = lambda: lambda key, timeout_ms: meet(
    key=key, timeout_ms=10**9
)
x = np.random.default_rng(0).normal(size=(8, 5_000))
places = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
params = {"x": jax.make_array_from_callback(x.shape, places, lambda at: x[at])}
place, folder = jax.process_index(), Path(sys.argv[1])
troubles = {
    (2, 0): lambda: lost_disk(folder / "checkpoints"),
    (3, 1): lambda: full_disk(3000),
    (4, 0): lambda: full_disk(3000),
}
with open_checkpoints(folder, CheckpointConfig(keep=9)) as manager:
    for step in range(1, 6):
        with troubles.get((step, place), nullcontext)():
            distributed.wait_for_all()
            with manager.attempt(step):
                save_restore.save_items(manager, step, {"params": params})
            while manager.saving is not None:
                manager.poll()
                time.sleep(0.01)
            distributed.wait_for_all()
    print(manager.failed, manager.steps(), flush=True)
"""


def test_a_failed_save_is_reported_to_all_processes_and_the_next_succeeds(
    tmp_path: Path,
) -> None:
    run = Processes(tmp_path, str(tmp_path / "run"), python=("-c", SAVES))
    assert run.wait() == [0, 0], run.said(0)
    for out in run.stdout:
        assert out.splitlines()[-1] == "[2, 3, 4] [1, 5]"
    said = run.stderr[0].read_text()
    assert said.count("COULD NOT BE SAVED") == 3
    assert "CHECKPOINT 3 COULD NOT BE SAVED (OSError: process 1: " in said


# The first checkpoint is read back. Then a store damages the next start's, and a copy
# of an array loses a bit on a device of process 1.
PROOFS = """
import sys
from absl import logging
from txl_jax.runtime import distributed

distributed.connect()
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.errors import UserError
from txl_jax.workdir.folder import find

logging.set_verbosity(logging.FATAL)
mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
folder = find(sys.argv[1])

def params(changed):
    x = np.random.default_rng(0).normal(size=(8, 5_000)).astype(np.float32)
    tree = {}
    for name, spec in {"a": (), "b": ("fsdp",), "c": (("data", "fsdp"),)}.items():
        place = NamedSharding(mesh, PartitionSpec(*spec))
        shards = []
        for device, at in place.addressable_devices_indices_map(x.shape).items():
            part = x[at].copy()
            if name == changed and device.id == jax.devices()[-1].id:
                part[0, 1] = np.nextafter(part[0, 1], 9)
            shards.append(jax.device_put(part, device))
        tree[name] = jax.make_array_from_single_device_arrays(x.shape, place, shards)
    return tree

def attempt(step, changed, damage):
    with open_checkpoints(folder) as manager:
        save_restore.save_items(manager, step, {"params": params(changed)})
        manager.orbax.wait_until_finished()
        for path in manager.folder(step).glob("params/*/d/*") if damage else ():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
        manager.wait()
        return manager.proved

assert attempt(1, "", False)
assert attempt(2, "c", False)  # has no copies
for step, changed, damage in ((3, "", not jax.process_index()), (4, "b", False)):
    try:
        attempt(step, changed, damage)
    except UserError as error:
        distributed.warn(str(error))
distributed.wait_for_all()
"""


@pytest.mark.parametrize(
    "is_remote", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_damaged_save_and_unequal_copies_are_errors_of_all_processes(
    tmp_path: Path, request: pytest.FixtureRequest, is_remote: bool
) -> None:
    workdir = request.getfixturevalue("remote") if is_remote else str(tmp_path / "run")
    run = Processes(tmp_path, workdir, python=("-c", PROOFS))
    assert run.wait() == [0, 0], run.stderr[0].read_text()
    for index, reason in enumerate(("array ", "(by process 0)")):
        damaged, differs = run.said(index)
        assert "checkpoint 3 was read back with other values than were saved" in damaged
        assert reason in damaged
        expected = (
            "b has other bits on 2 of its devices (device 0 of process 1, device 1"
        )
        assert f"array params/{expected} of process 1) than on device 0" in differs
