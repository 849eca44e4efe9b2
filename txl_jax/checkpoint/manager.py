"""The manager of a run's checkpoint folder: retention, failed saves, damaged steps."""

import contextlib
import dataclasses
import glob
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from txl_jax.checkpoint import backend, manifest
from txl_jax.checkpoint.backend import TRASH
from txl_jax.checkpoint.manifest import Damaged, Manifest
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import distributed, storage

LISTINGS = 60  # one a second: a network disk may show old files for a while
ITEMS = ("params", "average", "training", manifest.ITEM)
DEFAULT = CheckpointConfig()


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one folder; a save that fails does not end the run.

    The newest `keep` checkpoints and the best one are kept.
    """

    def __init__(self, folder: Path, keep: int, read_only: bool):
        self.directory = folder
        self.keep = keep
        self.remote = storage.is_remote(folder)
        self.manifests: dict[int, Manifest] = {}
        self.unreadable: dict[int, UserError] = {}  # steps without a valid manifest
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # steps that could not be saved
        self.reason = ""  # the error of the last one
        self.orbax = backend.open_manager(
            folder,
            ITEMS,
            [checkpoint_managers.LatestN(keep), backend.Best(self.best)],
            removes_partial=not self.remote,
            read_only=read_only,
        )
        self._agree()
        if not read_only:
            self._empty_trash()
            for path in backend.uncommitted(self.directory):
                say(f"{path} was not completed: it is removed after the next save")
        for step in self.steps():
            try:
                self.manifests[step] = self.read_manifest(step)
            except UserError as error:
                if self.remote and not isinstance(error, Damaged):
                    raise  # the best checkpoint would be unknown, and so deleted
                self.unreadable[step] = error

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agree(self) -> None:
        """Lists the checkpoints until all processes see the same ones.

        A run that was replaced may still complete one, and a run that is being read may
        be training. Raises UserError if the processes do not share the folder.
        """
        for _ in range(LISTINGS):
            if not distributed.differing({"steps": self.steps()}):
                return
            time.sleep(1)
            self.orbax.reload()
        raise UserError(
            f"the processes see different checkpoints in {self.directory}: give a "
            "--workdir on a disk that all of them share, or on gs://"
        )

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in order."""
        return sorted(self.orbax.all_steps())

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

    def find(self, which: str) -> int:
        """Returns the step of `which`, a value of eval.checkpoint.

        If no step was validated, the newest is the best. Raises UserError if there is
        no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise UserError(
                f"no checkpoint in {self.directory}: train there first, or give the "
                "--workdir of a trained run"
            )
        if which == "best":
            if not self.manifests:
                raise UserError(
                    f"every checkpoint in {self.directory} is damaged: restore one "
                    "from a backup"
                )
            for error in self.unreadable.values():
                say(f"{error}: using the best of the others")
            best = self.best(self.manifests)
            return max(self.manifests) if best is None else best
        step = steps[-1] if which == "latest" else int(which)
        if step not in steps:
            raise UserError(
                f"eval.checkpoint = {which!r} is not a checkpoint in {self.directory}: "
                f"give best, latest or one of {', '.join(map(str, steps))}"
            )
        return step

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
        except (jax.errors.JaxRuntimeError, *self.errors) as error:
            is_jax_error = isinstance(error, jax.errors.JaxRuntimeError)
            if is_jax_error and "DEADLINE_EXCEEDED" not in str(error):
                raise  # a fault of a device, or a lost process
            if self.saving not in (None, step):  # an earlier one, which may succeed
                self.poll(wait=True)
            self.failed.append(step)
            self.reason = storage.one_line(error)
            self.manifests.pop(step, None)
            self.saving = None
            # The other items fail as well; their errors would surface in the next save.
            for clear in (self.orbax.wait_until_finished, self.orbax.check_for_errors):
                with contextlib.suppress(jax.errors.JaxRuntimeError, *self.errors):
                    clear()
            self._remove_partial()
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training "
                f"continues, the newest checkpoint is {self.orbax.latest_step()}"
            )

    def start(self, saved: Manifest, args: ocp.args.Composite) -> None:
        """Starts to save a checkpoint; `wait` must precede it."""
        self.manifests[saved.step] = saved
        if not self.orbax.save(saved.step, args=args):
            raise ValueError(f"checkpoint {self.orbax.latest_step()} exists already")
        self.saving = saved.step

    def add_loss(self, step: int, valid_nll_nats: float | None) -> None:
        """Adds the validation loss, unless None, to a checkpoint's manifest."""
        self.wait()
        if valid_nll_nats is None:
            return
        saved = dataclasses.replace(self.manifests[step], valid_nll=valid_nll_nats)
        self.manifests[step] = saved
        with distributed.together(*self.errors):
            if distributed.is_first():
                manifest.write(self.folder(step), saved)

    def poll(self, wait: bool = False) -> None:
        """Completes the pending save if it is done; cheap enough for every step.

        Reports a failure, and removes files that are no longer needed. Orbax raises its
        error in the next save only, and lists the step until then.
        """
        if self.saving is None or not (wait or not self.orbax.is_saving_in_progress()):
            return
        with self.attempt(self.saving):
            try:
                self.orbax.wait_until_finished()
            except self.errors as error:
                # Orbax also lists a failed checkpoint as saved.
                path = self.folder(self.saving)
                if not (path / backend.COMMITTED if self.remote else path).exists():
                    raise
                reason = storage.one_line(error)
                say(f"an old checkpoint could not be deleted ({reason})")
        if self.saving is not None:
            with contextlib.suppress(*storage.errors()):
                for path in backend.uncommitted(self.directory):
                    path.rmtree()  # type: ignore[attr-defined]  # an epath.Path
        self.saving = None
        self._empty_trash()

    def wait(self) -> None:
        """Waits for the pending save; must precede the next one."""
        self.poll(wait=True)
        if self.failed:
            self._remove_partial()

    def finish(self, step: int) -> None:
        """Waits for the last save; raises UserError if `step` is not saved."""
        self.wait()
        newest = self.orbax.latest_step()
        if step in self.failed and newest != step:
            raise UserError(
                f"the last checkpoint, of update {step}, could not be saved in "
                f"{self.directory} ({self.reason}): fix this and run the same command "
                f"again; it continues from update {newest or 0}"
            )

    def close(self) -> None:
        """Waits for the pending save, reports it if it fails, and ends the threads."""
        try:
            with contextlib.suppress(*storage.errors()):
                self.poll(wait=True)
        finally:
            self.orbax.close()

    def set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that orbax neither lists nor deletes them."""
        if not steps:
            return
        for step in steps if distributed.is_first() else ():
            folder, number = self.folder(step), 1
            while (aside := folder.with_name(f"{step}.damaged-{number}")).exists():
                number += 1
            folder.rename(aside)
            say(f"checkpoint {step} is set aside as {aside}")
        distributed.wait_for_all()
        self.orbax.reload()

    def trim(self) -> None:
        """Deletes surplus checkpoints that a killed process has left."""
        steps = self.steps()
        kept = {*steps[-self.keep :], self.best(steps)}
        for step in (step for step in steps if step not in kept):
            self.orbax.delete(step)
        self._empty_trash()

    def _empty_trash(self) -> None:
        if distributed.is_first() and not self.remote:
            shutil.rmtree(self.directory / TRASH, ignore_errors=True)

    def _remove_partial(self) -> None:
        """Removes partial files of a failed save, and reloads orbax's list of steps.

        On gs://, which may be unreachable, they are removed after the next save.
        """
        if self.remote:
            return
        with contextlib.suppress(OSError):
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)  # a thread may still write
            self.orbax.reload()


def open_checkpoints(
    workdir: Path, config: CheckpointConfig = DEFAULT, *, read_only: bool = False
) -> Checkpoints:
    """Returns the manager of `<workdir>/checkpoints`; close it, or use it in `with`."""
    folder = storage.absolute(workdir / "checkpoints")
    if glob.has_magic(str(folder)):
        where = f"--workdir={str(folder.parent)!r}"
        raise UserError(f"{where} has one of [ * ? in its path: give another")
    return Checkpoints(folder, config.keep, read_only)
