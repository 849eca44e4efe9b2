"""The manager of a run's checkpoint folder: retention, failed saves, damaged steps."""

import contextlib
import glob
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from txl_jax.checkpoint import manifest, quiet
from txl_jax.checkpoint.barrier import Barriers, create_own_folders
from txl_jax.checkpoint.manifest import Damaged, Manifest
from txl_jax.checkpoint.options import NAMES, CheckpointConfig
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import distributed, preemption, storage

COMMITTED = "commit_success.txt"  # orbax's name
LISTINGS = 60  # one a second: a network disk may show old files for a while
TRASH = "deleted"  # a checkpoint is moved here before its files are removed
ITEMS = ("params", "average", "training", manifest.ITEM)
DEFAULT = CheckpointConfig()


class Checkpoints(ocp.CheckpointManager):
    """Orbax's manager of one folder; a save that fails does not end the run.

    The newest `keep` checkpoints and the best one are kept. Orbax's own `max_to_keep`
    with `best_fn` would delete the newest steps while the loss rises.
    """

    def __init__(self, folder: Path, keep: int, read_only: bool):
        self.keep = keep
        self.remote = storage.is_remote(folder)
        self.manifests: dict[int, Manifest] = {}
        self.unreadable: dict[int, UserError] = {}  # steps without a valid manifest
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # steps that could not be saved
        self.reason = ""  # the error of the last one
        self.barriers = Barriers()
        self.read_back: Callable[[], None] | None = None  # reads the newest save
        self.proved = False  # a save has been read back
        settings: dict[str, Any] = {"todelete_subdir": TRASH}
        if read_only:  # settings that a reader cannot use would be warned about
            settings = {"save_interval_steps": 0, "create": False}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            cleanup_tmp_directories=not read_only and not self.remote,
            read_only=read_only,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self.barriers),
            **settings,
        )
        super().__init__(folder, item_names=ITEMS, options=options)
        self._agree()
        if not read_only:
            self._empty_trash()
        self.partial = [] if read_only else self._uncommitted()
        for path in self.partial:
            say(f"{path} was not completed: it is removed after the next checkpoint")
        for step in self.all_steps():
            try:
                self.manifests[step] = self.read_manifest(step)
            except UserError as error:
                if self.remote and not isinstance(error, Damaged):
                    raise  # the best checkpoint would be unknown, and so deleted
                self.unreadable[step] = error

    def _agree(self) -> None:
        """Lists the checkpoints until all processes see the same ones.

        A run that was replaced may still complete one, and a run that is being read may
        be training. Raises UserError if the processes do not share the folder.
        """
        for _ in range(LISTINGS):
            if not distributed.differing({"steps": sorted(self.all_steps())}):
                return
            time.sleep(1)
            self.reload()
        raise UserError(
            f"the processes see different checkpoints in {self.directory}: give a "
            "--workdir on a disk that all of them share, or on gs://"
        )

    def folder(self, step: int) -> Path:
        """Returns the folder of a checkpoint."""
        return self.directory / str(step)

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
        """Returns False: orbax would ask jax with other step numbers than the loop."""
        return False

    def _wait_for_checkpointers(self) -> None:
        """Waits for the writes; orbax calls this in the background of a save."""
        try:
            super()._wait_for_checkpointers()
        except BaseException as error:
            self.barriers.fail(error)
            raise

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of a save after which a run continues."""
        return ValueError, *storage.errors()

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Reports an error of a save, and lets the run continue.

        Older checkpoints are kept, and partial files of the failed one are removed.
        """
        try:
            yield
        except self.errors as error:
            self.failed.append(step)
            self.reason = storage.one_line(error)
            self.manifests.pop(step, None)
            self.saving = self.read_back = None
            # The other items fail as well; their errors would surface in the next save.
            for wait in (
                self.wait_until_finished,
                self._checkpointer.wait_until_finished,
            ):
                with contextlib.suppress(*self.errors):
                    wait()
            with contextlib.suppress(*storage.errors()):
                self._remove_partial()
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training "
                f"continues, the newest checkpoint is {self.latest_step()}"
            )

    def poll(self, wait: bool = False) -> None:
        """Completes the pending save if it is done; cheap enough for every step.

        Reports a failure, and removes files that are no longer needed. Orbax raises its
        error in the next save only, and lists the step until then.
        """
        if self.saving is not None and (wait or not self.is_saving_in_progress()):
            with self.attempt(self.saving):
                try:
                    self.wait_until_finished()
                except self.errors as error:
                    # Orbax also lists a failed checkpoint as saved.
                    path = self.folder(self.saving)
                    if not (path / COMMITTED if self.remote else path).exists():
                        raise
                    reason = storage.one_line(error)
                    say(f"an old checkpoint could not be deleted ({reason})")
            if self.saving is not None:
                self._remove_uncommitted()
            self.saving = None
            self._empty_trash()

    def wait(self) -> None:
        """Waits for the pending save; must precede the next one.

        The first checkpoint of a start is then read back.
        """
        self.poll(wait=True)
        read_back, self.read_back = self.read_back, None
        # Reading takes longer than a preempted machine has; the next start does it.
        if not self.proved and not preemption.current().reached:
            with jax.transfer_guard("allow"):
                failed = distributed.anywhere(read_back is None)
            if read_back and not failed:
                read_back()
        if self.failed and not self.remote:
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

    def close(self) -> None:
        """Waits for the pending save, reports it if it fails, and ends the threads."""
        try:
            with contextlib.suppress(*storage.errors()):
                self.poll(wait=True)
        finally:
            super().close()

    def set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that orbax neither lists nor deletes them."""
        if not steps:
            return
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
        if jax.process_index() == 0 and not self.remote:
            shutil.rmtree(self.directory / TRASH, ignore_errors=True)

    def _remove_partial(self) -> None:
        """Removes partial files of a failed save, and reloads orbax's list of steps."""
        if self.remote:  # may be unreachable: removed after the next save
            self.partial = [self.folder(self.failed[-1])]
            return
        for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)  # a thread may still be writing
        self.reload()

    def _uncommitted(self) -> list[Any]:
        """Returns the incomplete checkpoints on gs://, where orbax cannot rename.

        There a checkpoint is complete once it has a commit file, which is written last.
        """
        if not self.remote or jax.process_index() or not self.directory.exists():
            return []
        folders = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        return [path for path in folders if not (path / COMMITTED).exists()]

    def _remove_uncommitted(self) -> None:
        """Removes incomplete checkpoints on gs://, after a save that succeeded."""
        if self.partial:
            with contextlib.suppress(*storage.errors()):
                for path in {*self.partial} & {*self._uncommitted()}:
                    path.rmtree()
                self.partial = []


def open_checkpoints(
    workdir: Path, config: CheckpointConfig = DEFAULT, *, read_only: bool = False
) -> Checkpoints:
    """Returns the manager of `<workdir>/checkpoints`; close it, or use it in `with`."""
    quiet.quiet_orbax()
    if not read_only:
        create_own_folders()
    folder = storage.absolute(workdir / "checkpoints")
    if glob.has_magic(str(folder)):
        where = f"--workdir={str(folder.parent)!r}"
        raise UserError(f"{where} has one of [ * ? in its path: give another")
    return Checkpoints(folder, config.keep, read_only)
