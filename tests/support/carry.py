"""Restores a run on a mesh of all its processes' devices, and saves it elsewhere.

    python -m tests.support.carry SOURCE TARGET 2,1,2

Where SOURCE has no checkpoint yet, it is trained for a few updates first.
"""

import sys
from pathlib import Path

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.manifest import Manifest
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.data.streams import Position
from txl_jax.runtime import distributed

STEP = 2


def carry(source: Path, target: Path, sizes: tuple[int, int, int]) -> None:
    """Goes through a mesh of data, fsdp and model with the state and the position."""
    from tests.promises.test_mesh_invariance import Run

    run = Run(sizes)
    with open_checkpoints(source, read_only=True) as manager:
        restored = save_restore.restore(manager, run.like)
    if restored:
        state, position = restored.state, restored.position
    else:
        state, position, _ = run.train(run.init(), Position(), STEP)
    with open_checkpoints(target, CheckpointConfig()) as manager:
        save_restore.save(manager, STEP, state, position, None)


def manifest(folder: Path) -> Manifest:
    """Returns the checkpoint's manifest: checksums and the position."""
    with open_checkpoints(folder, read_only=True) as manager:
        return manager.read_manifest(STEP)


if __name__ == "__main__":
    distributed.connect(300)
    first, second, third = map(int, sys.argv[3].split(","))
    carry(Path(sys.argv[1]), Path(sys.argv[2]), (first, second, third))
    distributed.wait_for_all()
