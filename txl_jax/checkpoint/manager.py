"""The manager of a run's checkpoint folder: retention, failed saves, damaged steps."""

import contextlib
import functools
import logging
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from txl_jax.checkpoint import manifest
from txl_jax.checkpoint.manifest import Manifest
from txl_jax.checkpoint.options import NAMES, CheckpointConfig
from txl_jax.errors import UserError
from txl_jax.report.log import say

TRASH = "deleted"  # a checkpoint is moved here before its files are removed
ITEMS = ("params", "average", "training", manifest.ITEM)


class Uploader(Protocol):
    """Copies the checkpoints of a local folder to remote storage, in the background."""

    failed: list[int]  # steps whose copies failed

    def begin(self, steps: Iterable[int]) -> None:
        """Starts to copy those of the folder's checkpoints that are new."""

    def poll(self, wait: bool = False) -> None:
        """Reports a copy that failed."""

    def finish(self, step: int, steps: Collection[int]) -> None:
        """Waits until `step` is copied; raises UserError if it cannot be."""

    def fetch(self, step: int, items: Iterable[str]) -> None:
        """Downloads items of a checkpoint that the folder lacks; raises Damaged."""

    def forget(self, steps: Iterable[int]) -> None:
        """Treats the copies of damaged checkpoints as absent."""


class Checkpoints(ocp.CheckpointManager):
    """Orbax's manager of one folder; a save that fails does not end the run.

    The newest `keep` checkpoints and the best one are kept. Orbax's own `max_to_keep`
    with `best_fn` would delete the newest steps while the loss rises, and its metrics
    have no checksum.
    """

    def __init__(
        self, folder: Path, keep: int, uploader: Uploader | None, read_only: bool
    ):
        self.keep = keep
        self.uploader = uploader
        self.manifests: dict[int, Manifest] = {}
        self.unreadable: dict[int, UserError] = {}  # steps without a valid manifest
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # steps that could not be saved
        self.reason = ""  # the error of the last one
        settings: dict[str, Any] = {"todelete_subdir": TRASH}
        if read_only:  # settings that a reader cannot use would be warned about
            settings = {"save_interval_steps": 0, "create": False}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            **settings,
        )
        super().__init__(folder, item_names=ITEMS, options=options)
        if not read_only:
            self._empty_trash()
        for step in self.all_steps():
            try:
                self.manifests[step] = self.read_manifest(step)
            except UserError as error:
                self.unreadable[step] = error

    def folder(self, step: int) -> Path:
        """Returns the folder of a checkpoint."""
        return Path(self.directory) / str(step)

    def read_manifest(self, step: int) -> Manifest:
        """Returns the manifest of a checkpoint; raises Damaged."""
        return manifest.read(self.folder(step), step)

    def validated(self, step: int) -> bool:
        """Returns whether a checkpoint was saved with its validation loss."""
        return step in self.manifests and self.manifests[step].valid_nll is not None

    def best(self, steps: Iterable[int]) -> int | None:
        """Returns the step with the least validation loss, None if none has one."""
        ranks = [self.manifests[step].rank for step in steps if step in self.manifests]
        best = min((rank for rank in ranks if rank), default=None)
        return best and -best[1]

    def find(self, which: str) -> list[int]:
        """Returns the steps of `which`, a value of eval.checkpoint, in order.

        If no step was validated, the newest is the best. Raises UserError if there is
        no such checkpoint.
        """
        steps = sorted(self.all_steps())
        if not steps:
            raise UserError(
                f"no checkpoint in {self.directory}: train there first, or give the "
                "--workdir of a trained run"
            )
        if which == "best":
            if not (readable := [step for step in steps if step in self.manifests]):
                raise UserError(
                    f"every checkpoint in {self.directory} is damaged: restore one "
                    "from a backup"
                )
            for step in sorted(set(steps) - set(readable)):
                say(f"{self.unreadable[step]}: using the best of the others")
            best = self.best(readable)
            return readable[-1:] if best is None else [best]
        if which in NAMES:
            return steps if which == "average" else steps[-1:]
        if not (chosen := set(which.replace(" ", "").split(","))) <= {*map(str, steps)}:
            raise UserError(
                f"eval.checkpoint = {which!r} is not a checkpoint in {self.directory}: "
                f"give best, latest, average or steps of {', '.join(map(str, steps))}"
            )
        return sorted(map(int, chosen))

    def should_preserve(self, checkpoints: list[Any], *, context: Any) -> list[bool]:
        """Returns which checkpoints to keep; orbax's interface for retention."""
        return self._preserved([info.step for info in checkpoints])

    def _preserved(self, steps: list[int]) -> list[bool]:
        kept = {*sorted(steps)[-self.keep :], self.best(steps)}
        return [step in kept for step in steps]

    def reached_preemption(self, step: int) -> bool:
        """Returns False: only the loop polls jax's preemption service.

        Orbax would poll it with other step numbers, and so agree on a step in the past.
        """
        return False

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Reports an error of a save, and lets the run continue.

        Older checkpoints are kept, and partial files of the failed one are removed.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            self.failed.append(step)
            self.reason = one_line(error)
            self.manifests.pop(step, None)
            self.saving = None
            # The other items fail as well; their errors would surface in the next save.
            for wait in (
                self.wait_until_finished,
                self._checkpointer.wait_until_finished,
            ):
                with contextlib.suppress(OSError, ValueError):
                    wait()
            with contextlib.suppress(OSError):
                self._remove_partial()
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training "
                f"continues, the newest checkpoint is {self.latest_step()}"
            )

    def poll(self, wait: bool = False) -> None:
        """Reports the pending save if it has failed; cheap enough for every step.

        Orbax raises its error in the next save only, and lists the step until then.
        """
        if self.saving is not None and (wait or not self.is_saving_in_progress()):
            with self.attempt(self.saving):
                self.wait_until_finished()
            self.saving = None
            self._empty_trash()
            if self.uploader:
                self.uploader.begin(self.all_steps())
        if self.uploader:
            self.uploader.poll(wait)

    def wait(self) -> None:
        """Waits for the pending save; must precede the next one."""
        self.poll(wait=True)
        if self.failed:
            self._remove_partial()

    def finish(self, step: int) -> None:
        """Waits for the last save; raises UserError if `step` is not saved."""
        self.wait()
        if step in self.failed and self.latest_step() != step:
            raise UserError(
                f"the last checkpoint, of update {step}, could not be saved in "
                f"{self.directory} ({self.reason}): fix this and run the same command "
                f"again; it continues from update {self.latest_step() or 0}"
            )
        if self.uploader:
            self.uploader.finish(step, self.all_steps())

    def close(self) -> None:
        """Waits for the pending save, reports it if it fails, and ends the threads."""
        with contextlib.suppress(OSError):
            self.wait()
        super().close()

    def set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that orbax neither lists nor deletes them."""
        if not steps:
            return
        if self.uploader:
            self.uploader.forget(steps)
        for step in steps if jax.process_index() == 0 else ():
            folder, number = self.folder(step), 1
            while (aside := folder.with_name(f"{step}.damaged-{number}")).exists():
                number += 1
            folder.rename(aside)
            say(f"checkpoint {step} is set aside as {aside}")
        multihost_utils.sync_global_devices("set aside")
        self.reload()

    def trim(self) -> None:
        """Deletes surplus checkpoints that a killed process has left."""
        steps = list(self.all_steps())
        for step, kept in zip(steps, self._preserved(steps), strict=True):
            if not kept:
                self.delete(step)
        self._empty_trash()

    def _empty_trash(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / TRASH, ignore_errors=True)

    def _remove_partial(self) -> None:
        """Removes partial files of a failed save, and reloads orbax's list of steps."""
        for path in Path(self.directory).glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)  # a thread may still be writing
        self.reload()


def open_checkpoints(
    workdir: Path,
    config: CheckpointConfig,
    uploader: Uploader | None = None,
    *,
    read_only: bool = False,
) -> Checkpoints:
    """Returns the manager of `<workdir>/checkpoints`; close it when done."""
    _quiet_orbax()
    folder = (workdir / "checkpoints").absolute()
    return Checkpoints(folder, config.keep, uploader, read_only)


@functools.cache
def _quiet_orbax() -> None:
    """Suppresses orbax's messages about abandoned operations and read-only folders.

    When one operation fails, each of the others would print a traceback when it ends or
    is garbage-collected.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Given directory is read")
    )
    hook = sys.unraisablehook

    def filtered_hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = filtered_hook


def one_line(error: BaseException) -> str:
    """Returns the beginning of an error's message.

    For TensorStore's long messages, the array and the system's reason come first.
    """
    text = str(error)
    array = re.search(r"""path\\?['"]: ?\\?['"]([^/'"\\]+)/\\?['"]""", text)
    system = re.search(r": ([^:\[]+) \[os_error_code=", text)
    parts = [f"array {array[1]}"] if array else []
    parts += [system[1]] if system else []
    first = f"{type(error).__name__}: {text}".splitlines()[0]
    return ": ".join([*parts, first[: 80 if parts else 150]])
