"""The folder of a run's checkpoints: what is kept in it, and which saves failed.

Dims: none.
"""

import contextlib
import dataclasses
import functools
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from txl_jax import bucket
from txl_jax import record as records
from txl_jax.copies import Copies
from txl_jax.errors import UserError, require
from txl_jax.record import Damaged, Record
from txl_jax.report.writer import say

TRASH = "deleted"  # where a checkpoint goes at once, before its files are removed
ITEMS = ("params", "average", "training", "record")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep; a validated step is always saved."""

    every_steps: int = 4_000  # updates between checkpoints
    keep: int = 2  # newest checkpoints kept; the best one is kept beside them

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "checkpoint", 1, "every_steps", "keep")


class Checkpoints(ocp.CheckpointManager):
    """orbax's manager of one folder, that notices which saves fail and goes on.

    Retention is our own: orbax's `max_to_keep` with `best_fn` would delete the newest
    steps when the loss rises, and reads metrics that nothing guards.
    """

    def __init__(self, folder: Path, keep: int, read_only: bool):
        self.keep = keep
        self.records: dict[int, Record] = {}
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # the steps that could not be
        self.reason = ""  # why the last of them could not
        there = bucket.of(folder.parent)
        self.copies = Copies(there) if there else None
        # A reader is told to leave what orbax would otherwise warn that it leaves.
        leave: dict[str, Any] = {"save_interval_steps": 0, "create": False}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            **(leave if read_only else {"todelete_subdir": TRASH}),
        )
        super().__init__(folder, item_names=ITEMS, options=options)
        if not read_only:
            self._empty_trash()
        self.unread: dict[int, UserError] = {}  # why the others' could not be
        for step in self.all_steps():
            try:
                self.records[step] = self.read_record(step)
            except UserError as error:  # it matters only to who asks for it
                self.unread[step] = error

    def should_preserve(self, checkpoints: list[Any], *, context: Any) -> list[bool]:
        """Returns which checkpoints stay: orbax asks before a save deletes any."""
        return self._preserved([info.step for info in checkpoints])

    def _preserved(self, steps: list[int]) -> list[bool]:
        newest = sorted(steps)[-self.keep :]
        best = self.best(steps)
        return [step in newest or step == best for step in steps]

    def best(self, steps: list[int]) -> int | None:
        """Returns the one with the least nll on valid, None if none was validated."""
        ranked = {
            step: self.records[step].rank for step in steps if step in self.records
        }
        best = min((rank for rank in ranked.values() if rank), default=None)
        return best and -best[1]

    def validated(self, step: int) -> bool:
        """Returns whether a checkpoint was saved with its validation."""
        return step in self.records and self.records[step].valid_nll is not None

    def reached_preemption(self, step: int) -> bool:
        """Returns False: the loop alone asks the preemption service.

        Asked from here too, with other numbers, it would agree on one that is gone by.
        """
        return False

    def folder(self, step: int) -> Path:
        """Returns where a checkpoint lies."""
        return Path(self.directory) / str(step)

    def read_record(self, step: int) -> Record:
        """Returns a checkpoint's record; raises Damaged."""
        return records.read(self.folder(step) / "record" / "metadata", step)

    def poll(self, wait: bool = False) -> None:
        """Says so if the save that was going on has failed; cheap to call often.

        orbax tells of it at the next save only, and counts the step as saved till then.
        """
        if self.saving is not None and (wait or not self.is_saving_in_progress()):
            with self.attempt(self.saving):
                self.wait_until_finished()
            self.saving = None
            self._empty_trash()
            if self.copies:
                self.copies.begin(self.all_steps())
        if self.copies:
            self.copies.poll(wait)

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Saves inside: if the disk is full or gone, says so and lets the run go on.

        The older checkpoints stay, and what there is of the new one is removed.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            self.failed.append(step)
            self.reason = one_line(error)
            self.records.pop(step, None)
            self.saving = None
            # Its other parts fail as well, and what they raise would meet the next.
            for wait in (
                self.wait_until_finished,
                self._checkpointer.wait_until_finished,
            ):
                with contextlib.suppress(OSError, ValueError):
                    wait()
            with contextlib.suppress(OSError):
                self._clear()
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training goes "
                f"on, the newest is {self.latest_step()}; the next is tried as usual"
            )

    def settle(self) -> None:
        """Waits for the save that is going on; call it before the next."""
        self.poll(wait=True)
        if self.failed:
            self._clear()

    def _clear(self) -> None:
        """Removes what a failed save left, and makes orbax count what there is."""
        for path in Path(self.directory).glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)  # a writer may still be at work
        self.reload()

    def read(self, record: Record, like: dict[str, Any]) -> dict[str, Any]:
        """Returns items of a checkpoint as in `like`, verified.

        Raises Damaged, or UserError where they are of another model or forbidden.
        """
        records.refuse_misfits(record, like)
        if self.copies:
            self.copies.bucket.fetch_checkpoint(record.step, like)
        saved = {}
        for item, tree in like.items():  # apart, so that an error tells which it was
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(tree)})
            trouble = ""
            try:
                saved[item] = self.restore(record.step, args=args)[item]
            except (jax.errors.JaxRuntimeError, MemoryError):
                raise  # the device's fault, or the host's
            except Exception as error:  # whatever orbax meets in a damaged folder
                trouble = one_line(error)
            if "PermissionError" in trouble or "PERMISSION_DENIED" in trouble:
                raise UserError(f"cannot read checkpoint {record.step} ({trouble})")
            if trouble:
                raise Damaged(record.step, f"item {item}, {trouble}")
        records.verify(record, saved)
        return saved

    def set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints: orbax then neither counts nor deletes them."""
        if not steps:
            return
        if self.copies:
            self.copies.bucket.forget(steps)
        for step in steps if jax.process_index() == 0 else ():
            folder, number = self.folder(step), 1
            while (aside := folder.with_name(f"{step}.damaged-{number}")).exists():
                number += 1
            folder.rename(aside)
            say(f"checkpoint {step} is set aside as {aside}")
        multihost_utils.sync_global_devices("set aside")
        self.reload()

    def trim(self) -> None:
        """Deletes what a kill kept the last save from deleting."""
        steps = list(self.all_steps())
        for step, stays in zip(steps, self._preserved(steps), strict=True):
            if not stays:
                self.delete(step)
        self._empty_trash()

    def _empty_trash(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / TRASH, ignore_errors=True)

    def finish(self, step: int) -> None:
        """Waits for the last save; raises UserError if `step` is not saved.

        Of a workdir in a bucket it is saved once it is there too.
        """
        self.settle()
        if step in self.failed and self.latest_step() != step:
            raise UserError(
                f"the last checkpoint, of update {step}, could not be saved in "
                f"{self.directory} ({self.reason}): mend that, and give the same "
                f"command again; it goes on from update {self.latest_step() or 0}"
            )
        if self.copies:
            self.copies.finish(step, self.all_steps())

    def close(self) -> None:
        """Waits for the last save, says so if it failed, and ends the threads."""
        with contextlib.suppress(OSError):
            self.settle()
        super().close()


@functools.cache
def _hush_orbax() -> None:
    """Lets the reads and writes that orbax drops, when another fails, go in silence.

    Each would print a traceback when it ends or is collected, around the one line. That
    a folder is only to be read is no news either.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Given directory is read")
    )
    hook = sys.unraisablehook

    def hear(heard: Any) -> None:
        code = getattr(heard.object, "cr_code", None)
        dropped = code is not None and "orbax" in code.co_filename
        if not dropped and str(heard.exc_value) != "Event loop is closed":
            hook(heard)

    sys.unraisablehook = hear


def one_line(error: BaseException) -> str:
    """Returns the beginning of what an exception says.

    Of TensorStore's, which are long: the array that they are about, and the system's
    own reason.
    """
    text = str(error)
    array = re.search(r"""path\\?['"]: ?\\?['"]([^/'"\\]+)/\\?['"]""", text)
    system = re.search(r": ([^:\[]+) \[os_error_code=", text)
    parts = [f"array {array[1]}"] if array else []
    parts += [system[1]] if system else []
    first = f"{type(error).__name__}: {text}".splitlines()[0]
    return ": ".join([*parts, first[: 80 if parts else 150]])


def open_checkpoints(
    workdir: Path, config: CheckpointConfig, *, read_only: bool = False
) -> Checkpoints:
    """Returns `<workdir>/checkpoints`; close it to wait for the last."""
    _hush_orbax()
    folder = (workdir / "checkpoints").absolute()
    return Checkpoints(folder, config.keep, read_only)
