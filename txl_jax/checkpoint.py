"""Checkpoints, through orbax: what a run needs to go on exactly, or a model to serve.

A checkpoint of step k holds the parameters, their mean where the run has one, the rest
of TrainState, and a Record: digests of all arrays and the Position of the first batch
that the state has not consumed. All of it commits at once, by the renaming of a folder.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from txl_jax.data.streams import Position
from txl_jax.digest import digests, named_leaves
from txl_jax.errors import UserError
from txl_jax.optim import Average
from txl_jax.record import Damaged, Record
from txl_jax.report.wait import waiting
from txl_jax.report.writer import say
from txl_jax.state import TrainState
from txl_jax.store import CheckpointConfig, Checkpoints, open_checkpoints

__all__ = ["CheckpointConfig", "Checkpoints", "open_checkpoints"]


def save(
    manager: Checkpoints,
    step: int,
    state: TrainState,
    position: Position,
    valid_nll_nats: float | None,
) -> None:
    """Starts saving step `step`; the arrays are copied before this returns.

    valid_nll_nats, None where nothing was validated, decides which one is the best.
    Validated, a step takes the place of itself saved before its validation. Raises
    OSError or ValueError when saving cannot start; `poll` tells of the rest.
    """
    if valid_nll_nats is not None and step in manager.all_steps():
        manager.settle()
        manager.delete(step)
    save_items(manager, step, _trees(state), position, valid_nll_nats)


def save_items(
    manager: Checkpoints,
    step: int,
    trees: dict[str, Any],
    position: Position | None = None,
    valid_nll_nats: float | None = None,
) -> None:
    """Starts saving what is in `trees`: {"params": params} for a model alone."""
    manager.settle()
    record = Record(step, position, valid_nll_nats, digests(trees))
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    args = ocp.args.Composite(**items, record=ocp.args.JsonSave(record.to_json()))
    manager.records[step] = record
    if not manager.save(step, args=args):
        raise ValueError(f"there is a checkpoint {manager.latest_step()} already")
    manager.saving = step


class Restored(NamedTuple):
    """A run as it was when a checkpoint was made."""

    step: int
    state: TrainState
    position: Position


def restore(manager: Checkpoints, like: TrainState) -> Restored | None:
    """Returns the newest checkpoint that is not damaged, or None if there is none.

    `like` holds shapes, dtypes and shardings, and decides where the arrays go. Newer
    ones that are damaged are renamed, so that their steps can be saved again. Raises
    UserError when all are damaged, which leaves them as they are, or when they are of
    another model.
    """
    manager.poll(wait=True)
    damaged: dict[int, str] = {}
    for step in sorted(manager.all_steps(), reverse=True):
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
            f"{'; '.join(damaged.values())}; bring one back, or give another --workdir "
            "to start anew (nothing was deleted)"
        )
    return None


def _restore(manager: Checkpoints, step: int, like: TrainState) -> Restored:
    record = manager.read_record(step)
    if record.position is None:
        raise Damaged(step, "it holds parameters alone")
    saved = manager.read(record, _trees(like))
    rest = saved["training"]
    rest["memory"] = _with_empty(rest["memory"], like.memory)
    if like.average:
        rest["average"] = Average(saved["average"], rest.pop("averaged"))
    return Restored(step, TrainState(params=saved["params"], **rest), record.position)


NAMES = ("best", "latest", "average")


def check_which(which: str, field: str) -> None:
    """Refuses what names no checkpoint of any run."""
    if which not in NAMES and not all(map(_is_step, which.split(","))):
        raise UserError(
            f"{field} = {which[:80]!r} is neither best, latest, average (of all kept) "
            "nor a step, or several with commas between (their average)"
        )


def _is_step(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 20


def find_steps(manager: Checkpoints, which: str) -> list[int]:
    """Returns the steps of the checkpoints that `which` names, in order.

    The best is the newest while nothing was validated. Raises UserError when there is
    no such checkpoint.
    """
    steps = sorted(manager.all_steps())
    if not steps:
        raise UserError(
            f"no checkpoint in {manager.directory}: train there first, or give the "
            "--workdir of a run that did"
        )
    if which == "best":
        damaged = sorted(set(steps) - manager.records.keys())
        if damaged == steps:
            raise UserError(
                f"every checkpoint in {manager.directory} is damaged: bring one back"
            )
        for step in damaged:
            say(f"{manager.unread.get(step)}: the best of the others is taken")
            steps.remove(step)
    best = manager.best(steps)
    named = {
        "best": steps[-1:] if best is None else [best],
        "latest": steps[-1:],
        "average": steps,
    }
    parts = which.split(",")
    found = named.get(which) or [int(part) if _is_step(part) else -1 for part in parts]
    if not set(found) <= set(steps):
        raise UserError(
            f"eval.checkpoint = {which!r} is neither best, latest, average nor of the "
            f"steps {', '.join(map(str, steps))}"
        )
    return sorted(set(found))


def restore_params(
    manager: Checkpoints, which: str, like: Any, *, averages: bool = False
) -> tuple[Any, int]:
    """Returns (params, step) of the checkpoints `which`, a value of eval.checkpoint.

    Of several: the mean of their parameters, of which two are in memory at a time, and
    the newest's step. averages: the run keeps a mean of its parameters in each; that is
    what is returned, or averaged. Raises UserError when there is no such checkpoint,
    Damaged when it is not as it was saved.
    """
    manager.poll(wait=True)
    steps = find_steps(manager, which)
    item = "average" if averages else "params"

    def read(step: int) -> Any:
        return manager.read(manager.read_record(step), {item: like})[item]

    add = jax.jit(_add, donate_argnums=0)
    total = read(steps[0])
    for step in steps[1:]:
        total = add(total, read(step))
    if len(steps) > 1:
        say(f"the mean of the checkpoints {', '.join(map(str, steps))}")
        total = jax.tree.map(lambda x: x / len(steps), total)
    return total, steps[-1]


def read_shapes(
    manager: Checkpoints, step: int, *, averages: bool = False
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that a checkpoint holds, by their names."""
    item = "average/" if averages else "params/"
    return {
        name.removeprefix(item): shape
        for name, (_, shape, _) in manager.read_record(step).arrays.items()
        if name.startswith(item)
    }


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by their names, as in "layers/attention/q"."""
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params)}


def _add(total: Any, more: Any) -> Any:
    return jax.tree.map(jnp.add, total, more)


def abstract(shapes: Any, shardings: Any) -> Any:
    """Returns `shapes` with where each array is to live."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _trees(state: TrainState) -> dict[str, Any]:
    """Returns the items of a checkpoint; `average` only where the state has one."""
    names = [field.name for field in dataclasses.fields(state)]
    own = ("params", "average")
    training = {name: getattr(state, name) for name in names if name not in own}
    training["memory"] = _without_empty(state.memory)
    trees = {"params": state.params, "training": training}
    if state.average:
        trees["average"] = state.average.params  # as params is, to be read in its place
        training["averaged"] = state.average.count
    return trees


def _without_empty(tree: Any) -> Any:
    """Returns the tree with None for arrays of no numbers, which orbax refuses.

    The memory of a model without one is such an array.
    """
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _with_empty(tree: Any, like: Any) -> Any:
    """Returns the tree that `_without_empty` was given."""

    def fill(wanted: Any, found: Any) -> Any:
        if found is not None:
            return found
        return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)

    return jax.tree.map(fill, like, tree)
