"""Failed saves of two processes: both report the failure, and the run continues."""

from pathlib import Path

import pytest

from tests.support.processes import Processes

# Process 0 loses the folder in step 2, and cannot write its part of step 4; process 1
# cannot write its part of step 3. The other process waits until the time limit.
SAVES = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from absl import logging
from txl_jax.runtime import distributed

distributed.connect()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tests.faults.test_disk import full_disk, lost_disk
from txl_jax.checkpoint import listing, save_restore

logging.set_verbosity(logging.FATAL)
save_restore.LIMIT_SECONDS = 30
x = np.random.default_rng(0).normal(size=(8, 5_000))
places = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
params = {"x": jax.make_array_from_callback(x.shape, places, lambda at: x[at])}
place, folder = jax.process_index(), Path(sys.argv[1])
troubles = {
    (2, 0): lambda: lost_disk(folder / "checkpoints"),
    (3, 1): lambda: full_disk(3000),
    (4, 0): lambda: full_disk(3000),
}
with save_restore.Checkpoints(folder, keep=9) as manager:
    for step in range(1, 6):
        with troubles.get((step, place), nullcontext)():
            distributed.wait_for_all()
            with manager.attempt(step):
                manager.save_items(step, {"params": params})
            manager.poll(wait=True)
            distributed.wait_for_all()
    print(manager.failed, listing.list_steps(manager.folder), flush=True)
"""


@pytest.mark.long
def test_a_failed_save_is_reported_to_all_processes_and_the_next_succeeds(
    tmp_path: Path,
) -> None:
    run = Processes(tmp_path, str(tmp_path / "run"), python=("-c", SAVES))
    assert run.wait() == [0, 0], run.said(0)
    for out in run.stdout:
        assert out.splitlines()[-1] == "[2, 3, 4] [1, 5]"
    said = run.stderr[0].read_text()
    assert said.count("COULD NOT BE SAVED") == 3
    assert said.count("newest checkpoint is 1") == 3
