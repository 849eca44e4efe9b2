"""Checkpoints, through orbax: what a run needs to go on exactly, or a model to serve.

A checkpoint of step k holds the parameters, their mean where the run has one, the rest
of TrainState, and as JSON the Position of the first batch that the state has not
consumed. All of it commits at once.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy
from orbax.checkpoint.options import AtomicityMode, AtomicityOptions

from txl_jax.data.streams import Position
from txl_jax.errors import UserError, require
from txl_jax.optim import Average
from txl_jax.report.writer import say
from txl_jax.state import TrainState


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep; a validated step is always saved."""

    every_steps: int = 4_000  # updates between checkpoints
    keep: int = 2  # newest checkpoints kept; the best one is kept beside them

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "checkpoint", 1, "every_steps", "keep")


def valid_nll(metrics: dict[str, float]) -> float:
    """Returns what the best checkpoint has least of: nats per token on valid.

    Not a number is the worst of all, where sorting would make it the best.
    """
    nll = metrics["valid_nll"]
    return math.inf if math.isnan(nll) else nll


class Manager(ocp.CheckpointManager):
    """orbax's, but for the preemption service, which the loop alone asks.

    Asked from here too, with other numbers, it would agree on one that is gone by.
    """

    def reached_preemption(self, step: int) -> bool:
        """Returns False."""
        return False


def open_checkpoints(
    workdir: Path, config: CheckpointConfig, *, read_only: bool = False
) -> ocp.CheckpointManager:
    """Returns the manager of `<workdir>/checkpoints`; close it to wait for the last.

    Retention goes by policies: orbax's own `max_to_keep` with `best_fn` would delete
    the newest steps when the loss rises. COMMIT_FILE makes orbax trust a folder only
    when its last file is there, so that neither an empty folder nor half a copy counts.
    """
    keep = [
        preservation_policy.LatestN(config.keep),
        preservation_policy.BestN(
            get_metric_fn=valid_nll,
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        ),
    ]
    options = ocp.CheckpointManagerOptions(
        best_fn=valid_nll,
        best_mode="min",
        preservation_policy=preservation_policy.AnyPreservationPolicy(keep),
        atomicity_options=AtomicityOptions(mode=AtomicityMode.COMMIT_FILE),
        cleanup_tmp_directories=not read_only,
        read_only=read_only,
    )
    return Manager((workdir / "checkpoints").absolute(), options=options)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    position: Position,
    valid_nll_nats: float | None,
) -> None:
    """Starts saving step `step`; the arrays are copied before this returns.

    valid_nll_nats, None where nothing was validated, decides which one is the best.
    Validated, a step takes the place of itself saved before its validation.
    """
    if valid_nll_nats is not None and manager.latest_step() == step:
        manager.delete(step)
    items = {name: ocp.args.StandardSave(x) for name, x in _trees(state).items()}
    args = ocp.args.Composite(**items, position=ocp.args.JsonSave(position._asdict()))
    metrics = None if valid_nll_nats is None else {"valid_nll": valid_nll_nats}
    manager.save(step, args=args, metrics=metrics)


def has_nll(manager: ocp.CheckpointManager, step: int) -> bool:
    """Returns whether step `step` was saved with its validation."""
    return bool(manager.metrics(step))


def save_params(manager: ocp.CheckpointManager, step: int, params: Any) -> None:
    """Starts saving parameters alone, of a model that was trained elsewhere."""
    args = ocp.args.Composite(params=ocp.args.StandardSave(params))
    manager.save(step, args=args)


def restore(
    manager: ocp.CheckpointManager, like: TrainState
) -> tuple[TrainState, Position] | None:
    """Returns the newest checkpoint's state and position, or None if there is none.

    `like` holds shapes, dtypes and shardings, and decides where the arrays go.
    """
    step = manager.latest_step()
    if step is None:
        return None
    items = {name: ocp.args.StandardRestore(x) for name, x in _trees(like).items()}
    args = ocp.args.Composite(**items, position=ocp.args.JsonRestore())
    saved = manager.restore(step, args=args)
    rest = saved.training
    rest["memory"] = _with_empty(rest["memory"], like.memory)
    if like.average:
        rest["average"] = Average(saved.average, rest.pop("averaged"))
    return TrainState(params=saved.params, **rest), Position(**saved.position)


NAMES = ("best", "latest", "average")


def check_which(which: str, field: str) -> None:
    """Refuses what names no checkpoint of any run."""
    if which not in NAMES and not all(map(_is_step, which.split(","))):
        raise UserError(
            f"{field} = {which!r} is neither best, latest, average (of all kept) nor a "
            "step, or several with commas between (their average)"
        )


def _is_step(text: str) -> bool:
    return text.strip().isdecimal()


def find_steps(manager: ocp.CheckpointManager, which: str) -> list[int]:
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
    best = manager.best_step()
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
    manager: ocp.CheckpointManager, which: str, like: Any, *, averages: bool = False
) -> tuple[Any, int]:
    """Returns (params, step) of the checkpoints `which`, a value of eval.checkpoint.

    Of several: the mean of their parameters, of which two are in memory at a time, and
    the newest's step. averages: the run keeps a mean of its parameters in each; that is
    what is returned, or averaged. Raises UserError when there is no such checkpoint.
    """
    steps = find_steps(manager, which)
    item = "average" if averages else "params"
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    add = jax.jit(_add, donate_argnums=0)
    total = manager.restore(steps[0], args=args)[item]
    for step in steps[1:]:
        total = add(total, manager.restore(step, args=args)[item])
    if len(steps) > 1:
        say(f"the mean of the checkpoints {', '.join(map(str, steps))}")
        total = jax.tree.map(lambda x: x / len(steps), total)
    return total, steps[-1]


def read_shapes(
    manager: ocp.CheckpointManager, step: int, *, averages: bool = False
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that a checkpoint holds, by their names."""
    folder = manager.directory / str(step) / ("average" if averages else "params")
    return shapes(ocp.StandardCheckpointHandler().metadata(folder).tree)


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by their names, as in "layers/attention/q"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


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
