"""Saves and restores a run, to continue it exactly, or only its parameters.

A checkpoint of step k has the items "params", "average" (if the run averages its
parameters), "training" (the rest of TrainState) and the manifest, which holds the
Position of the first batch that the state has not consumed. Orbax commits them
together: it renames a folder, or on gs:// writes a commit file last.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array

from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.array_checksum import Leaf, Tree, checksums, named_leaves
from txl_jax.checkpoint.manager import Checkpoints
from txl_jax.checkpoint.manifest import Damaged, Imported, Items, Manifest
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.model.initializers import Params
from txl_jax.report.log import say
from txl_jax.report.progress import waiting
from txl_jax.runtime import distributed, storage
from txl_jax.update.state import Average, Program, TrainState


def save(
    manager: Checkpoints,
    step: int,
    state: TrainState,
    position: Position,
    valid_nll_nats: float | None,
) -> None:
    """Starts to save a run at `step`; the arrays are copied before this returns.

    valid_nll_nats ranks the checkpoint; None = not validated. A step that was saved
    before its validation only gets the loss. Raises OSError or ValueError if saving
    cannot start; `Checkpoints.poll` reports later failures.
    """
    if step in manager.steps():
        return manager.add_loss(step, valid_nll_nats)
    save_items(manager, step, _items(state), position, valid_nll_nats)


def save_items(
    manager: Checkpoints,
    step: int,
    items: Items,
    position: Position | None = None,
    valid_nll_nats: float | None = None,
) -> None:
    """Starts to save pytrees by item name: {"params": params} for a model alone."""
    manager.wait()
    manifest = Manifest(step, position, valid_nll_nats, checksums(items))
    args: dict[str, ocp.args.CheckpointArgs] = {
        name: ocp.args.StandardSave(tree) for name, tree in items.items()
    }
    args[manifests.ITEM] = ocp.args.JsonSave(manifest.to_json())
    manager.start(manifest, ocp.args.Composite(**args))


class Snapshot(NamedTuple):
    """A run at a step, as a checkpoint saves and restores it."""

    step: int
    state: TrainState
    position: Position


def restore(manager: Checkpoints, like: TrainState) -> Snapshot | None:
    """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

    `like` holds the shapes, dtypes and shardings of the result. Newer checkpoints that
    are damaged are renamed, so that their steps can be saved again, and surplus ones,
    which a killed process left, are deleted. Raises UserError if every checkpoint is
    damaged (and renames none), or one has another model or only parameters.
    """
    manager.poll(wait=True)
    damaged: dict[int, str] = {}
    for step in reversed(manager.steps()):
        try:
            with waiting(f"reading checkpoint {step} of {manager.directory}"):
                restored = _restore(manager, step, like)
        except Damaged as error:
            say(f"{error}: TRYING AN OLDER ONE")
            damaged[step] = str(error)
            continue
        manager.set_aside(list(damaged))
        manager.trim()
        return restored
    if damaged:
        raise UserError(
            f"no checkpoint in {manager.directory} can be restored: "
            f"{'; '.join(damaged.values())}; restore one from a backup, or give "
            "another --workdir to start from scratch (nothing was deleted)"
        )
    return None


def restore_or_init(
    manager: Checkpoints, workdir: Path, program: Program, params: Params | None
) -> Snapshot:
    """Returns the newest checkpoint, or the state of a fresh run.

    params: the fresh run's parameters; None = random ones. For errors, see `restore`.
    """
    like = abstract(jax.eval_shape(program.init), program.shardings)
    if resumed := restore(manager, like):
        say(f"resumed at update {resumed.step} from {manager.directory}")
        return resumed
    say(f"fresh run in {workdir}")
    with waiting("compiling and computing the initial parameters"):
        state = program.init()
    if params is not None:
        state = state.start_from(jax.device_put(params, program.shardings.params))
    return Snapshot(0, state, Position())


def _restore(manager: Checkpoints, step: int, like: TrainState) -> Snapshot:
    manifest = manager.read_manifest(step)
    if manifest.position is None:
        raise Imported(manager.directory.parent)
    items = _read(manager, manifest, _items(like))
    training = items["training"]
    training["memory"] = _with_empty(training["memory"], like.memory)
    training["rng"] = jax.random.wrap_key_data(training["rng"])
    if like.average:
        training["average"] = Average(items["average"], training.pop("averaged"))
    state = TrainState(params=items["params"], **training)
    return Snapshot(step, state, manifest.position)


def restore_params(
    manager: Checkpoints, which: str, like: Params
) -> tuple[Params, int]:
    """Returns (params, step) of the checkpoint `which`, a value of eval.checkpoint.

    The parameters of a run that averages are their average. Raises UserError if there
    is no such checkpoint, Damaged if it is damaged.
    """
    manager.poll(wait=True)
    step = manager.find(which)
    manifest = manager.read_manifest(step)
    has_average = any(name.startswith("average/") for name in manifest.arrays)
    item = "average" if has_average else "params"
    return _read(manager, manifest, {item: like})[item], step


def _read(manager: Checkpoints, manifest: Manifest, like: Items) -> Items:
    """Returns the items in `like` of a checkpoint, verified.

    Raises Damaged, or UserError if they have another model or may not be read.
    """
    manifests.check_arrays(manifest, like)
    items = {}
    for item, tree in like.items():  # one by one, so that an error has the item's name
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(tree)})
        reason = ""
        try:
            items[item] = manager.orbax.restore(manifest.step, args=args)[item]
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # a fault of the device or the host
        except Exception as error:  # orbax raises many types for a damaged folder
            reason = storage.one_line(error)
        if distributed.anywhere(bool(reason)):
            if any(word in reason for word in storage.UNREACHABLE):
                raise UserError(f"cannot read checkpoint {manifest.step} ({reason})")
            reason = reason or "reported by another process"
            raise Damaged(manifest.step, f"item {item}, {reason}")
    manifests.verify(manifest, items)
    return items


def shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by names like "layers/attention/q"."""
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params)}


def abstract(arrays: Tree, shardings: Tree) -> Tree:
    """Returns a tree of `ShapeDtypeStruct` with shardings, as `restore` expects."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        shardings,
    )


def _items(state: TrainState) -> Items:
    """Returns the items of a checkpoint; "average" only if the state has one."""
    names = [field.name for field in dataclasses.fields(state)]
    own_items = ("params", "average")
    training = {name: getattr(state, name) for name in names if name not in own_items}
    training["rng"] = _key_data(state.rng)
    # Orbax refuses arrays of size 0, such as the memory of a model with mem_len = 0.
    training["memory"] = jax.tree.map(lambda x: x if x.size else None, state.memory)
    items = {"params": state.params, "training": training}
    if state.average:  # an item with the structure of params, to be read in its place
        items["average"] = state.average.params
        training["averaged"] = state.average.count
    return items


def _key_data(key: Leaf) -> Leaf:
    """Returns the numbers of a random key: orbax stores no key without a file more."""
    if isinstance(key, jax.ShapeDtypeStruct):
        data: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, key)
        return data.update(sharding=key.sharding)
    return jax.random.key_data(key)


def _with_empty(tree: Tree, like: Tree) -> Tree:
    """Returns the tree with arrays of size 0 where `_items` put None."""

    def fill(expected: jax.ShapeDtypeStruct, restored: Array | None) -> Array:
        if restored is not None:
            return restored
        return jnp.zeros(expected.shape, expected.dtype, device=expected.sharding)

    return jax.tree.map(fill, like, tree)
