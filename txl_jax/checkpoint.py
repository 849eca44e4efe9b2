"""Checkpoints, through orbax: what a run needs to go on exactly, or a model to serve.

A checkpoint of step k holds the parameters, the rest of TrainState, and as JSON the
Position of the first batch that the state has not consumed. All of it commits at once.
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
    return ocp.CheckpointManager((workdir / "checkpoints").absolute(), options=options)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    position: Position,
    valid_nll_nats: float | None,
) -> None:
    """Starts saving step `step`; the arrays are copied before this returns.

    valid_nll_nats, None where nothing was validated, decides which one is the best.
    """
    args = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        training=ocp.args.StandardSave(_without_empty(_training(state))),
        position=ocp.args.JsonSave(position._asdict()),
    )
    metrics = None if valid_nll_nats is None else {"valid_nll": valid_nll_nats}
    manager.save(step, args=args, metrics=metrics)


def restore(
    manager: ocp.CheckpointManager, like: TrainState
) -> tuple[TrainState, Position] | None:
    """Returns the newest checkpoint's state and position, or None if there is none.

    `like` holds shapes, dtypes and shardings, and decides where the arrays go.
    """
    step = manager.latest_step()
    if step is None:
        return None
    args = ocp.args.Composite(
        params=ocp.args.StandardRestore(like.params),
        training=ocp.args.StandardRestore(_without_empty(_training(like))),
        position=ocp.args.JsonRestore(),
    )
    saved = manager.restore(step, args=args)
    training = _with_empty(saved.training, _training(like))
    return TrainState(params=saved.params, **training), Position(**saved.position)


def restore_params(
    manager: ocp.CheckpointManager, which: str, like: Any
) -> tuple[Any, int]:
    """Returns (params, step) of the checkpoint `which`: "best", "latest" or a step.

    The best is the newest while nothing was validated. Raises UserError when there is
    no such checkpoint.
    """
    steps = manager.all_steps()
    if not steps:
        raise UserError(
            f"no checkpoint in {manager.directory}: train there first, or give the "
            "--workdir of a run that did"
        )
    named = {"best": manager.best_step(), "latest": manager.latest_step()}
    step = named.get(which) or (manager.latest_step() if which == "best" else None)
    if step is None and which.isdigit() and int(which) in steps:
        step = int(which)
    if step is None:
        raise UserError(
            f"eval.checkpoint = {which!r} is neither best, latest nor one of the steps "
            f"{', '.join(map(str, sorted(steps)))}"
        )
    args = ocp.args.Composite(params=ocp.args.StandardRestore(like))
    return manager.restore(step, args=args).params, step


def abstract(shapes: Any, shardings: Any) -> Any:
    """Returns `shapes` with where each array is to live."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _training(state: TrainState) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(state)]
    return {name: getattr(state, name) for name in names if name != "params"}


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
