"""The checkpoints in a folder: which steps were saved, and which one is asked for."""

import glob
import time
from collections.abc import Iterable
from pathlib import Path

from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.manifest import Damaged, Imported, Manifest
from txl_jax.errors import UserError
from txl_jax.model.modules import Params
from txl_jax.report.log import say
from txl_jax.runtime import distributed, storage

COMMITTED = "commit_success.txt"  # on gs://, the file that orbax writes last
LISTINGS = 60  # one a second: a network disk may list old files for a while


def find_folder(workdir: Path) -> Path:
    """Returns the folder of a run's checkpoints; raises UserError for [ * ? in it."""
    folder = storage.absolute(workdir / "checkpoints")
    if glob.has_magic(str(folder)):  # orbax would not find its own checkpoints
        where = f"--workdir={str(folder.parent)!r}"
        raise UserError(f"{where} has one of [ * ? in its path: give another")
    return folder


def is_complete(path: Path) -> bool:
    """Returns whether a path is a checkpoint that was committed."""
    committed = path / COMMITTED if storage.is_remote(path) else path
    return path.name.isdecimal() and committed.exists()


def list_steps(folder: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint, in order.

    Lists them until all processes see the same ones. Raises UserError if the processes
    do not share the folder.
    """
    for _ in range(LISTINGS):
        storage.forget_listings()
        paths = folder.iterdir() if folder.is_dir() else ()
        steps = sorted(int(path.name) for path in paths if is_complete(path))
        if not distributed.differing({"steps": steps}):
            return steps
        time.sleep(1)
    raise UserError(
        f"the processes see different checkpoints in {folder}: give a --workdir on a "
        "disk that all of them share, or on gs://"
    )


def read_manifests(folder: Path) -> tuple[dict[int, Manifest], dict[int, Damaged]]:
    """Returns the manifests of complete checkpoints, and damaged ones, by step."""
    saved: dict[int, Manifest] = {}
    damaged: dict[int, Damaged] = {}
    for step in list_steps(folder):
        try:
            saved[step] = manifests.read_manifest(folder / str(step), step)
        except Damaged as error:
            damaged[step] = error
    return saved, damaged


def has_checkpoint(workdir: Path, like: Params) -> bool:
    """Returns whether a run continues from a checkpoint; writes nothing.

    Raises UserError if every checkpoint is damaged or the newest does not fit `like`.
    """
    saved, damaged = read_manifests(folder := find_folder(workdir))
    if damaged and not saved:
        raise all_damaged(folder, damaged.values())
    if saved:
        newest = saved[max(saved)]
        if newest.position is None:
            raise Imported(workdir)
        manifests.check_arrays(newest, {"params": like})
    return bool(saved)


def all_damaged(folder: Path, errors: Iterable[Damaged]) -> UserError:
    """Returns the error of a run that cannot continue."""
    return UserError(
        f"no checkpoint in {folder} can be restored: {'; '.join(map(str, errors))}; "
        "restore one from a backup, or give another --workdir to start from scratch "
        "(nothing was deleted)"
    )


def find_checkpoint(folder: Path, which: str) -> Manifest:
    """Returns the manifest of the checkpoint `which`, a value of eval.checkpoint.

    If no step was validated, the newest is the best. Raises UserError if there is no
    such checkpoint, Damaged if its manifest is damaged.
    """
    saved, damaged = read_manifests(folder)
    steps = sorted({*saved, *damaged})
    if not steps:
        raise UserError(
            f"no checkpoint in {folder}: train there first, or give the --workdir of a "
            "trained run"
        )
    step = int(which) if which.isdecimal() else steps[-1]
    if which == "best" and saved:
        for error in damaged.values():
            say(f"{error}: using the best of the other checkpoints")
        step = manifests.best(saved.values())
    if step not in steps:
        raise UserError(
            f"eval.checkpoint = {which!r} is not a checkpoint in {folder}: "
            f"give best, latest or one of {', '.join(map(str, steps))}"
        )
    if step in damaged:
        raise damaged[step]
    return saved[step]
