"""Saves and restores a run, to continue it exactly, or only its parameters.

A checkpoint of step k has the items "params", "average" (if the run averages its
parameters), "training" (the rest of TrainState) and the manifest, which holds the
Position of the first batch that the state has not consumed. Orbax commits them
together: it renames a folder, or on gs:// writes a commit file last.
"""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint import type_handlers

from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.listing import (
    COMMITTED,
    all_damaged,
    find_checkpoint,
    find_folder,
    is_complete,
    list_steps,
    read_manifests,
)
from txl_jax.checkpoint.manifest import Damaged, Imported, Items, Manifest
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.model.modules import Params
from txl_jax.report.log import say, waiting
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.explain import UNREACHABLE, one_line, storage_errors
from txl_jax.update.state import Average, TrainState, Updater

TRASH = "deleted"  # a checkpoint is moved here before its files are removed
LIMIT_SECONDS = 1200  # for a save, including the wait for a process that has failed
SLICE_BYTES = 2**20  # the smallest part in which an array is written; each is compiled


class Snapshot(NamedTuple):
    """A run at a step, as a checkpoint saves and restores it."""

    step: int
    state: TrainState
    position: Position


def save_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of a save after which a run continues."""
    return ValueError, *storage_errors()  # TensorStore raises ValueError


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


def make_checkpointer() -> ocp.AsyncCheckpointer:
    """Returns orbax's checkpointer for the items of a checkpoint."""
    # Folders are made before `save` returns, which reports a failure.
    options = ocp.AsyncOptions(
        timeout_secs=LIMIT_SECONDS, create_directories_asynchronously=False
    )
    array = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICE_BYTES)
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, array), (np.ndarray, type_handlers.NumpyHandler())
    )
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    handlers = dict.fromkeys(("params", "average", "training"), trees)
    handlers[manifests.ITEM] = ocp.JsonCheckpointHandler()
    of_items = ocp.CompositeOptions(async_options=options)
    handler = ocp.CompositeCheckpointHandler(composite_options=of_items, **handlers)
    return ocp.AsyncCheckpointer(handler, async_options=options)


class Checkpoints:
    """The checkpoints of a run; the newest `keep` and the best one are kept.

    A save that fails is reported and does not end the run. The end of `with` waits for
    the pending save, and ends the threads.
    """

    def __init__(self, workdir: Path, keep: int = 2):
        self.folder, self.keep = find_folder(workdir), keep
        self.manifests, _ = read_manifests(self.folder)
        self.saving: int | None = None  # the step that is being written
        self.failed: list[int] = []  # steps that could not be saved
        self.reason = ""  # the error of the last failed save
        self._checkpointer = make_checkpointer()
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] = Future()  # of the step `saving`

    def __enter__(self) -> Self:
        """Marks an empty folder: if it is missing later, checkpoints were lost."""
        if distributed.is_first() and not storage.is_remote(self.folder):
            with contextlib.suppress(OSError):  # which the first save reports
                self.folder.mkdir(parents=True, exist_ok=True)
                if not any(self.folder.iterdir()):
                    (self.folder / TRASH).mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.poll(wait=True)
        self._thread.shutdown()
        with contextlib.suppress(*save_errors()):
            self._checkpointer.close()
            if self.failed and distributed.is_first():
                self._tidy()

    def has_validation(self, step: int) -> bool:
        """Returns whether a checkpoint was saved with its validation loss."""
        return step in self.manifests and self.manifests[step].valid_nll is not None

    def save(
        self,
        step: int,
        state: TrainState,
        position: Position,
        valid_nll: float | None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save a run at `step`; the arrays are copied before this returns.

        valid_nll, in nats, ranks the checkpoint; None = not validated. A step that was
        saved before its validation only gets the loss. flush: writes what no checkpoint
        may precede, such as the log. Failures are reported, here or by `poll`.
        """
        with self.attempt(step):
            with distributed.together(*save_errors()):
                flush()
            self.poll(wait=True)
            if step not in self.manifests:
                self.save_items(step, _items(state), position, valid_nll)
            elif valid_nll is not None:
                saved = dataclasses.replace(self.manifests[step], valid_nll=valid_nll)
                self.manifests[step] = saved
                with distributed.together(*save_errors()):
                    if distributed.is_first():
                        manifests.write_manifest(self.folder / str(step), saved)

    def save_items(
        self,
        step: int,
        items: Items,
        position: Position | None = None,
        valid_nll: float | None = None,
    ) -> None:
        """Starts to save pytrees by item name: {"params": params} for a model alone.

        Raises one of `save_errors` if saving cannot start.
        """
        self.poll(wait=True)
        saved = Manifest(step, position, valid_nll, manifests.checksums(items))
        args = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        record = {manifests.ITEM: ocp.args.JsonSave(saved.to_json())}
        path = epath.Path(self.folder / str(step))
        with distributed.together(*save_errors()):  # the others would wait in `save`
            if distributed.is_first():
                if is_complete(path):
                    raise ValueError(f"{path} exists")
                self._tidy()
                if not storage.is_remote(self.folder):
                    (self.folder / TRASH).mkdir(parents=True, exist_ok=True)
        # Without `force`, all processes look for the folder, and gcsfs caches it.
        self._checkpointer.save(path, ocp.args.Composite(**args, **record), force=True)
        self.manifests[step], self.saving = saved, step
        self._pending = self._thread.submit(self._complete)

    def _tidy(self) -> None:
        """Removes what killed and failed saves have left."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            is_cut_off = path.name.isdecimal() and not is_complete(path)
            if is_cut_off or "orbax-checkpoint-tmp" in path.name:
                with contextlib.suppress(*save_errors()):  # it may still be written
                    epath.Path(path).rmtree()

    def _complete(self) -> None:
        """Waits for a save, then deletes old checkpoints; runs in a thread."""
        self._checkpointer.wait_until_finished()
        newest = sorted(self.manifests)[-self.keep :]
        kept = {*newest, manifests.best(self.manifests.values())}
        old = self.manifests.keys() - kept
        for step in old:
            del self.manifests[step]
        if distributed.is_first():
            try:
                for step in old:
                    self._delete(epath.Path(self.folder / str(step)))
                epath.Path(self.folder / TRASH).rmtree(missing_ok=True)
            except save_errors() as error:
                reason = one_line(error)
                say(f"an old checkpoint could not be deleted ({reason})")

    def _delete(self, path: epath.Path) -> None:
        """Deletes a checkpoint; a kill in between leaves none that looks complete."""
        if storage.is_remote(self.folder):
            (path / COMMITTED).unlink()
            path.rmtree()
        else:
            path.rename(self.folder / TRASH / path.name)

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Reports a failed save; raises if a device failed or a process was lost."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, *save_errors()) as error:
            # Orbax turns any failure to wait for another process into a TimeoutError.
            of_jax = error.__cause__ if isinstance(error, TimeoutError) else error
            if isinstance(of_jax, jax.errors.JaxRuntimeError):
                if "DEADLINE_EXCEEDED" not in str(of_jax):
                    raise  # a fault of a device, or a lost process
            if self.saving not in (None, step):  # an earlier save, which may succeed
                self.poll(wait=True)
            self.failed.append(step)
            # Orbax also waits for other processes while it handles an error of its own.
            is_wait = isinstance(error, jax.errors.JaxRuntimeError)
            self.reason = one_line((is_wait and error.__context__) or error)
            self.manifests.pop(step, None)
            self.saving = None
            say(
                f"CHECKPOINT {step} COULD NOT BE SAVED ({self.reason}): training "
                f"continues, the newest checkpoint is {max(self.manifests, default=0)}"
            )

    def poll(self, wait: bool = False) -> None:
        """Reports a failure of the pending save if it is done; cheap."""
        step = self.saving
        if step is not None and (wait or self._pending.done()):
            with self.attempt(step):
                self._pending.result()
            self.saving = None

    def finish(self, step: int) -> None:
        """Waits for the last save; raises UserError if `step` is not saved."""
        self.poll(wait=True)
        if step in self.failed:
            raise UserError(
                f"the last checkpoint, of update {step}, could not be saved in "
                f"{self.folder} ({self.reason}): fix this and run the same command "
                f"again; it continues from update {max(self.manifests, default=0)}"
            )

    def restore(self, like: TrainState) -> Snapshot | None:
        """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

        `like` holds the shapes, dtypes and shardings of the result. Newer checkpoints
        that are damaged are set aside. Raises UserError if every checkpoint is damaged
        (then none is renamed), or one has another model or only parameters.
        """
        self.poll(wait=True)
        damaged: dict[int, Damaged] = {}
        for step in reversed(list_steps(self.folder)):
            try:
                with waiting(f"reading checkpoint {step} of {self.folder}"):
                    snapshot = read_snapshot(self.folder, step, like)
            except Damaged as error:
                say(f"{error}: TRYING AN OLDER ONE")
                damaged[step] = error
            else:
                self._set_aside(list(damaged))
                return snapshot
        if damaged:
            raise all_damaged(self.folder, damaged.values())
        return None

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again."""
        for step in steps if distributed.is_first() else ():
            folder, number = self.folder / str(step), 1
            while (aside := folder.with_name(f"{step}.damaged-{number}")).exists():
                number += 1
            folder.rename(aside)
            say(f"checkpoint {step} is set aside as {aside}")
        distributed.wait_for_all()
        for step in steps:
            self.manifests.pop(step, None)


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
    items, step = Items(), manifest.step
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        for item, tree in like.items():  # one by one, so that an error names the item
            path, reason = epath.Path(folder / str(step) / item), ""
            try:
                items[item] = handler.restore(path, args=ocp.args.StandardRestore(tree))
            except (jax.errors.JaxRuntimeError, MemoryError):
                raise  # a fault of the device or the host
            except Exception as error:  # orbax raises many types for a damaged folder
                reason = one_line(error)
            if distributed.anywhere(bool(reason)):
                if any(word in reason for word in UNREACHABLE):
                    raise UserError(f"cannot read checkpoint {step} ({reason})")
                reason = reason or "reported by another process"
                raise Damaged(step, f"item {item}, {reason}")
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
