"""Saves and restores a run, to continue it exactly, or only its parameters.

A checkpoint of step k has the items "params", "average" (if the run averages its
parameters), "training" (the rest of TrainState) and the manifest, which holds the
Position of the first batch that the state has not consumed. Orbax commits them
together: it renames a folder, or on gs:// writes a commit file last.
"""

import contextlib
import dataclasses
import glob
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint import checkpoint_managers, type_handlers

from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.manifest import Damaged, Imported, Items, Manifest
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.model.initializers import Params
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, storage
from txl_jax.update.state import Average, TrainState, Updater

COMMITTED = "commit_success.txt"  # on gs://, the file that orbax writes last
TRASH = "deleted"  # a checkpoint is moved here before its files are removed
LIMIT_SECONDS = 1200  # for a save, including the wait for a process that has failed
SLICE_BYTES = 2**20  # the smallest part in which an array is written; each is compiled
LISTINGS = 60  # one a second: a network disk may list old files for a while
DEFAULT = CheckpointConfig()


class Snapshot(NamedTuple):
    """A run at a step, as a checkpoint saves and restores it."""

    step: int
    state: TrainState
    position: Position


def errors() -> tuple[type[Exception], ...]:
    """Returns the errors of a save after which a run continues."""
    return ValueError, *storage.errors()  # TensorStore raises ValueError


def mute_orbax() -> None:
    """Mutes orbax's log, and the operations that a failed save has abandoned.

    Each of these would print a traceback when it is garbage-collected. The settings are
    the process's, so programs make this call, and functions of the package do not.
    """
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def show_others(unraisable: "sys.UnraisableHookArgs") -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_orbax = code is not None and "orbax" in code.co_filename
        if not is_orbax and str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


class Manager(ocp.CheckpointManager):
    """Orbax's manager, without its use of jax's preemption service."""

    def reached_preemption(self, step: int) -> bool:
        """Returns False: orbax would ask jax with other step numbers than the loop."""
        return False


def item_handlers() -> dict[str, ocp.CheckpointHandler]:
    """Returns what writes each item of a checkpoint."""
    array = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICE_BYTES)
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, array), (np.ndarray, type_handlers.NumpyHandler())
    )
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    handlers = dict.fromkeys(("params", "average", "training"), trees)
    return {**handlers, manifests.ITEM: ocp.JsonCheckpointHandler()}


class Best:
    """Preserves the best checkpoint of some manifests: a `PreservationPolicy` of orbax.

    Orbax's own `BestN` needs a file for the loss besides the manifest, and if that file
    is damaged, the folder cannot be opened.
    """

    def __init__(self, saved: Mapping[int, Manifest]):
        self.saved = saved

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Returns which checkpoints to keep."""
        steps = [info.step for info in checkpoints]
        best = manifests.best(self.saved[step] for step in steps if step in self.saved)
        return [step == best for step in steps]


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of a run; the newest `keep` and the best one are kept.

    A save that fails is reported and does not end the run. The end of `with` waits for
    the pending save, and ends the threads.
    """

    def __init__(self, workdir: Path, options: CheckpointConfig = DEFAULT):
        self.folder = find_folder(workdir)
        self.keep = options.keep
        self.remote = storage.is_remote(self.folder)
        self.manifests, _ = read_manifests(self.folder)
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # steps that could not be saved
        self.reason = ""  # the error of the last failed save
        self._orbax: Manager | None = None

    def __enter__(self) -> Self:
        """Marks an empty folder: if it is missing later, checkpoints were lost."""
        if distributed.is_first() and not self.remote:
            with contextlib.suppress(OSError):  # which the first save reports
                self.folder.mkdir(parents=True, exist_ok=True)
                if not any(self.folder.iterdir()):
                    (self.folder / TRASH).mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._drop()

    def _open(self) -> Manager:
        """Opens orbax's manager, which removes leftovers of a killed run."""
        if self._orbax is None:
            policies = [checkpoint_managers.LatestN(self.keep), Best(self.manifests)]
            options = ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                # Threads of a failed save may still write; `_drop` allows for that.
                cleanup_tmp_directories=self.remote or not self.failed,
                todelete_subdir=TRASH,  # a rename is atomic; ignored on gs://
                # Folders are made at once, so that `save` reports a failure.
                async_options=ocp.AsyncOptions(
                    timeout_secs=LIMIT_SECONDS, create_directories_asynchronously=False
                ),
            )
            self._orbax = Manager(
                self.folder, options=options, item_handlers=item_handlers()
            )
        return self._orbax

    def _drop(self) -> None:
        """Closes orbax's manager after a failed save, and removes partial files."""
        if self._orbax:
            for close in (self._orbax.wait_until_finished, self._orbax.close):
                with contextlib.suppress(jax.errors.JaxRuntimeError, *errors()):
                    close()
        self._orbax = None
        if self.failed and not self.remote and distributed.is_first():
            for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def has_validation(self, step: int) -> bool:
        """Returns whether a checkpoint was saved with its validation loss."""
        return step in self.manifests and self.manifests[step].valid_nll is not None

    def save(
        self, step: int, state: TrainState, position: Position, valid_nll: float | None
    ) -> None:
        """Starts to save a run at `step`; the arrays are copied before this returns.

        valid_nll, in nats, ranks the checkpoint; None = not validated. A step that was
        saved before its validation only gets the loss. Raises one of `errors` if saving
        cannot start; `poll` and `wait` report later failures.
        """
        if step not in self.manifests:
            return self.save_items(step, _items(state), position, valid_nll)
        self.wait()
        if valid_nll is not None:
            saved = dataclasses.replace(self.manifests[step], valid_nll=valid_nll)
            self.manifests[step] = saved
            with distributed.together(*errors()):
                if distributed.is_first():
                    manifests.write_manifest(self.folder / str(step), saved)

    def save_items(
        self,
        step: int,
        items: Items,
        position: Position | None = None,
        valid_nll: float | None = None,
    ) -> None:
        """Starts to save pytrees by item name: {"params": params} for a model alone."""
        self.wait()
        if self.failed:
            self._drop()
        saved = Manifest(step, position, valid_nll, manifests.checksums(items))
        self.manifests[step] = saved  # `Best` reads it
        args: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(tree) for name, tree in items.items()
        }
        args[manifests.ITEM] = ocp.args.JsonSave(saved.to_json())
        with distributed.together(*errors()):  # the others would wait in `save`
            if distributed.is_first() and not self.remote:
                (self.folder / TRASH).mkdir(parents=True, exist_ok=True)
        if not self._open().save(step, args=ocp.args.Composite(**args)):
            raise ValueError("there is a newer checkpoint")
        self.saving = step

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Reports an error of a save, and lets the run continue."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, *errors()) as error:
            cause: BaseException = error
            if isinstance(error, jax.errors.JaxRuntimeError):
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise  # a fault of a device, or a lost process
                cause = error.__context__ or error  # orbax waited for another process
            if self.saving not in (None, step):  # an earlier save, which may succeed
                self.wait()
            self.failed.append(step)
            self.reason = storage.one_line(cause)
            self.manifests.pop(step, None)
            self.saving = None
            self._drop()
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training "
                f"continues, the newest checkpoint is {max(self.manifests, default=0)}"
            )

    def poll(self, wait: bool = False) -> None:
        """Completes the pending save if it is done; cheap enough for every update.

        Reports a failure, which orbax would raise in the next save.
        """
        step = self.saving
        if step is None or (self._open().is_saving_in_progress() and not wait):
            return
        with self.attempt(step):
            try:
                self._open().wait_until_finished()
            except errors() as error:
                if not is_complete(self.folder / str(step)):
                    raise
                reason = storage.one_line(error)
                say(f"an old checkpoint could not be deleted ({reason})")
        self.saving = None
        if distributed.is_first() and not self.remote and step not in self.failed:
            shutil.rmtree(self.folder / TRASH, ignore_errors=True)

    def wait(self) -> None:
        """Waits for the pending save; must precede the next one."""
        self.poll(wait=True)

    def finish(self, step: int) -> None:
        """Waits for the last save; raises UserError if `step` is not saved."""
        self.wait()
        if step in self.failed:
            raise UserError(
                f"the last checkpoint, of update {step}, could not be saved in "
                f"{self.folder} ({self.reason}): fix this and run the same command "
                f"again; it continues from update {max(self.manifests, default=0)}"
            )

    def restore(self, like: TrainState) -> Snapshot | None:
        """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

        `like` holds the shapes, dtypes and shardings of the result. Newer checkpoints
        that are damaged are renamed, so that their steps can be saved again. Raises
        UserError if every checkpoint is damaged (then none is renamed), or one has
        another model or only parameters.
        """
        self.wait()
        damaged: dict[int, str] = {}
        for step in reversed(list_steps(self.folder)):
            try:
                with waiting(f"reading checkpoint {step} of {self.folder}"):
                    snapshot = read_snapshot(self.folder, step, like)
            except Damaged as error:
                say(f"{error}: TRYING AN OLDER ONE")
                damaged[step] = str(error)
                continue
            self._set_aside(list(damaged))
            return snapshot
        if damaged:
            raise UserError(
                f"no checkpoint in {self.folder} can be restored: "
                f"{'; '.join(damaged.values())}; restore one from a backup, or give "
                "another --workdir to start from scratch (nothing was deleted)"
            )
        return None

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that orbax neither lists nor deletes them."""
        for step in steps if distributed.is_first() else ():
            folder, number = self.folder / str(step), 1
            while (aside := folder.with_name(f"{step}.damaged-{number}")).exists():
                number += 1
            folder.rename(aside)
            say(f"checkpoint {step} is set aside as {aside}")
        distributed.wait_for_all()
        for step in steps:
            self.manifests.pop(step, None)
        self._drop()


def restore_or_init(
    checkpoints: Checkpoints, workdir: Path, updater: Updater, params: Params | None
) -> Snapshot:
    """Returns the newest checkpoint, or the state of a fresh run.

    params: the fresh run's parameters; None = random ones. For errors, see
    `Checkpoints.restore`.
    """
    if resumed := checkpoints.restore(updater.like):
        say(f"resumed at update {resumed.step} from {checkpoints.folder}")
        return resumed
    say(f"fresh run in {workdir}")
    with waiting("compiling and computing the initial parameters"):
        state = updater.init()
    if params is not None:
        places = jax.tree.map(lambda x: x.sharding, updater.like.params)
        state = state.start_from(jax.device_put(params, places))
    return Snapshot(0, state, Position())


def find_folder(workdir: Path) -> Path:
    """Returns the folder of a run's checkpoints; raises UserError for [ * ? in it."""
    folder = storage.absolute(workdir / "checkpoints")
    if glob.has_magic(str(folder)):  # orbax would not find its own checkpoints
        where = f"--workdir={str(folder.parent)!r}"
        raise UserError(f"{where} has one of [ * ? in its path: give another")
    return folder


def list_steps(folder: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint, in order.

    Lists them until all processes see the same ones. Raises UserError if the processes
    do not share the folder.
    """
    for _ in range(LISTINGS):
        paths = folder.iterdir() if folder.is_dir() else ()
        steps = sorted(int(path.name) for path in paths if is_complete(path))
        if not distributed.differing({"steps": steps}):
            return steps
        time.sleep(1)
    raise UserError(
        f"the processes see different checkpoints in {folder}: give a --workdir on a "
        "disk that all of them share, or on gs://"
    )


def is_complete(path: Path) -> bool:
    """Returns whether a path is a checkpoint that was committed."""
    committed = path / COMMITTED if storage.is_remote(path) else path
    return path.name.isdecimal() and committed.exists()


def read_manifests(folder: Path) -> tuple[dict[int, Manifest], dict[int, Damaged]]:
    """Returns the manifests of complete checkpoints, and damaged ones, by step."""
    found: dict[int, Manifest] = {}
    damaged: dict[int, Damaged] = {}
    for step in list_steps(folder):
        try:
            found[step] = manifests.read_manifest(folder / str(step), step)
        except Damaged as error:
            damaged[step] = error
    return found, damaged


def has_checkpoint(workdir: Path, like: Params) -> bool:
    """Returns whether a run continues from a checkpoint; writes nothing.

    Raises UserError if every checkpoint is damaged or the newest does not fit `like`.
    """
    folder = find_folder(workdir)
    saved, damaged = read_manifests(folder)
    if saved:
        newest = saved[max(saved)]
        if newest.position is None:
            raise Imported(workdir)
        manifests.check_arrays(newest, {"params": like})
        return True
    for error in damaged.values():
        raise UserError(
            f"no checkpoint in {folder} can be restored ({error}): restore one "
            "from a backup, or give another --workdir to start from scratch"
        ) from error
    return False


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
    if which == "best" and saved:
        for error in damaged.values():
            say(f"{error}: using the best of the other checkpoints")
        best = manifests.best(saved.values())
        return saved[max(saved) if best is None else best]
    step = int(which) if which.isdecimal() else steps[-1]
    if step not in steps:
        raise UserError(
            f"eval.checkpoint = {which!r} is not a checkpoint in {folder}: "
            f"give best, latest or one of {', '.join(map(str, steps))}"
        )
    if step in damaged:
        raise damaged[step]
    return saved[step]


def restore_params(workdir: Path, which: str, like: Params) -> tuple[Params, int]:
    """Returns (params, step) of the checkpoint `which`, a value of eval.checkpoint.

    The parameters of a run that averages are their average. For errors, see
    `find_checkpoint`; raises Damaged also for damaged arrays.
    """
    folder = find_folder(workdir)
    manifest = find_checkpoint(folder, which)
    has_average = any(name.startswith("average/") for name in manifest.arrays)
    item = "average" if has_average else "params"
    return _read(folder, manifest, {item: like})[item], manifest.step


def read_snapshot(folder: Path, step: int, like: TrainState) -> Snapshot:
    """Returns a run at a step, verified; for errors, see `Checkpoints.restore`."""
    manifest = manifests.read_manifest(folder / str(step), step)
    if manifest.position is None:
        raise Imported(folder.parent)
    items = _read(folder, manifest, _items(like))
    training = items["training"]
    training["memory"] = jax.tree.map(
        lambda x, saved: (
            saved if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding)
        ),
        like.memory,
        training["memory"],
    )
    training["rng"] = jax.random.wrap_key_data(training["rng"])
    if like.average:
        training["average"] = Average(items["average"], training.pop("averaged"))
    state = TrainState(params=items["params"], **training)
    return Snapshot(step, state, manifest.position)


def _read(folder: Path, manifest: Manifest, like: Items) -> Items:
    """Returns the items in `like` of a checkpoint, verified.

    Raises Damaged, or UserError if they have another model or may not be read.
    """
    manifests.check_arrays(manifest, like)
    items: Items = {}
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        for item, tree in like.items():  # one by one, so that an error names the item
            path, reason = epath.Path(folder / str(manifest.step) / item), ""
            try:
                items[item] = handler.restore(path, args=ocp.args.StandardRestore(tree))
            except (jax.errors.JaxRuntimeError, MemoryError):
                raise  # a fault of the device or the host
            except Exception as error:  # orbax raises many types for a damaged folder
                reason = storage.one_line(error)
            if distributed.anywhere(bool(reason)):
                if any(word in reason for word in storage.UNREACHABLE):
                    raise UserError(
                        f"cannot read checkpoint {manifest.step} ({reason})"
                    )
                reason = reason or "reported by another process"
                raise Damaged(manifest.step, f"item {item}, {reason}")
    manifests.verify(manifest, items)
    return items


def _items(state: TrainState) -> Items:
    """Returns the items of a checkpoint; "average" only if the state has one."""
    names = [field.name for field in dataclasses.fields(state)]
    own_items = ("params", "average")
    training = {name: getattr(state, name) for name in names if name not in own_items}
    key = state.rng  # orbax would store a key in another file
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key).update(sharding=key.sharding)
    else:
        data = jax.random.key_data(key)
    training["rng"] = data
    # Orbax refuses arrays of size 0, such as the memory of a model with mem_len = 0.
    training["memory"] = jax.tree.map(lambda x: x if x.size else None, state.memory)
    items = {"params": state.params, "training": training}
    if state.average:  # has the structure of params and can be read instead of them
        items["average"] = state.average.params
        training["averaged"] = state.average.count
    return items
