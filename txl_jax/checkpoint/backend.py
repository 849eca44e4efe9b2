"""Orbax's checkpoint manager, with the settings and the policies of this project."""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers, type_handlers

from txl_jax.runtime import distributed, storage

TRASH = "deleted"  # a checkpoint is moved here before its files are removed
COMMITTED = "commit_success.txt"  # orbax's name
LIMIT_SECONDS = 1200  # of a save, also of waiting for a process that has failed
SLICE_BYTES = 2**20  # a copy of an array is written in parts, each compiled, of no less


class Manager(ocp.CheckpointManager):
    """Orbax's manager, without its use of jax's preemption service."""

    def reached_preemption(self, step: int) -> bool:
        """Returns False: orbax would ask jax with other step numbers than the loop."""
        return False


class Best:
    """Preserves the checkpoint that `best` chooses, a `PreservationPolicy` of orbax.

    Orbax's own `BestN` needs a file for the loss besides the manifest, and if that file
    is damaged, the folder cannot be opened.
    """

    def __init__(self, best: Callable[[Iterable[int]], int | None]):
        self.best = best

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Returns which checkpoints to keep."""
        best = self.best(info.step for info in checkpoints)
        return [info.step == best for info in checkpoints]


def open_manager(
    folder: Path,
    items: tuple[str, ...],
    policies: Sequence[checkpoint_managers.PreservationPolicy],
    *,
    removes_partial: bool,
    read_only: bool,
) -> Manager:
    """Returns orbax's manager of a folder; any policy can preserve a checkpoint."""
    quiet_orbax()
    handler = type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=SLICE_BYTES
    )
    type_handlers.register_type_handler(jax.Array, handler, override=True)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
        cleanup_tmp_directories=removes_partial and not read_only,
        read_only=read_only,
        create=not read_only,
        save_interval_steps=0 if read_only else 1,
        todelete_subdir=None if read_only else TRASH,
        async_options=ocp.AsyncOptions(timeout_secs=LIMIT_SECONDS),
    )
    return Manager(folder, item_names=items, options=options)


@functools.cache
def quiet_orbax() -> None:
    """Suppresses orbax's messages about abandoned operations and read-only folders.

    When one operation fails, each of the others would print a traceback when it ends or
    is garbage-collected.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Given directory is read")
    )
    hook = sys.unraisablehook

    def filtered_hook(unraisable: "sys.UnraisableHookArgs") -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = filtered_hook


def uncommitted(folder: Path) -> list[Path]:
    """Returns the incomplete checkpoints on gs://, where orbax cannot rename.

    There a checkpoint is complete once it has a commit file, which is written last.
    """
    if not storage.is_remote(folder) or not distributed.is_first():
        return []
    paths = folder.iterdir() if folder.exists() else ()
    steps = [path for path in paths if path.name.isdecimal()]
    return [path for path in steps if not (path / COMMITTED).exists()]
