"""Finds the first non-finite number in an update that the guard skipped."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.data.streams import Segment
from txl_jax.errors import BadNumbers
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, WordDropout
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.guard import REASONS
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import TrainState
from txl_jax.update.step import segment_nll, sum_gradients

LAYERS = "layers"  # arrays under this name are stacked over the layers
# The whole model, and modules that cannot introduce a bad number.
IGNORED = (TransformerXL, Dropout, WordDropout)

Path = tuple[str, ...]


def record_bad(order: list[Path]) -> Callable[..., Any]:
    """Returns a flax interceptor that counts non-finite outputs.

    The counts are intermediates of the model. It appends the (*path, method) of each
    module to `order` when the module first returns.
    """

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        module, method = context.module, context.method_name
        if method in ("__call__", "embed", "nll") and not isinstance(module, IGNORED):
            if (path := (*module.path, method)) not in order:
                order.append(path)
            finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(result)]
            bad = 1 - jnp.stack(finite).all().astype(jnp.int32)
            sum_up = {"init_fn": lambda: 0, "reduce_fn": jnp.add}
            module.sow("intermediates", method, bad, **sum_up)
        return result

    return intercept


def find_bad(
    model: TransformerXL,
    config: TrainConfig,
    state: TrainState,
    step: int,
    segments: Segment,
) -> str:
    """Returns a description of the first non-finite number of an update.

    The update after `step` others is computed again from its G segments, with the
    state's parameters and an empty memory. Outputs of modules come first, in the order
    of the forward pass, then gradients of parameters, in the order of the backward
    pass. If all are finite, the norm of the gradients is not, and the largest gradient
    is named. Layers are numbered from 0.
    """
    order: list[Path] = []

    def nll_sum(params: Any, memory: Memory, segment: Segment, key: Array) -> Any:
        variables, rngs = {"params": params}, {"dropout": key}
        with nn.intercept_methods(record_bad(order)):
            (nll_BL, memory), variables = segment_nll(
                model, variables, memory, segment, rngs, mutable=["intermediates"]
            )
        counts = jnp.sum(segment.weights_SBL), variables["intermediates"]
        return jnp.sum(nll_BL * segment.weights_SBL), (memory, counts)

    def compute(params: Any, rng: Array, step: Array, segments: Segment) -> Any:
        memory = Memory.empty(model.config, config.batch_size)
        key = jax.random.fold_in(rng, step)
        first = jax.tree.map(lambda x: x[0], segments)
        _, (_, counts) = jax.eval_shape(nll_sum, params, memory, first, key)
        counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
        parts = params, memory, segments, key
        total, _ = sum_gradients(nll_sum, *parts, config.batch_chunk, counts)
        tokens, bad = total.counts
        grads = jax.tree.map(lambda grad: grad / tokens, total.grads)
        return bad, norms(params), norms(grads)

    # Replicated, so that every process can read all of it.
    run = jax.jit(compute, out_shardings=state.step.sharding)
    args = state.params, state.rng, step, segments
    bad, sizes, grads = jax.device_get(run(*args))
    broken = [name(path, n) for path, n, size in unstack(sizes) if np.isnan(size)]
    also = f"; the parameter {broken[0]} itself is not finite" if broken else ""
    return name_first(order, bad, grads) + also


def norms(tree: Any) -> Any:
    """Returns the norm of each leaf, [N] if it is stacked over the layers, float32.

    A norm is NaN if the leaf is not finite, infinite if only a square is not.
    """

    def norm(path: Any, x: Array) -> Array:
        axes = tuple(range(1 if path[0].key == LAYERS else 0, x.ndim))
        size = jnp.sqrt(jnp.sum(jnp.square(x), axes))
        return jnp.where(jnp.isfinite(x).all(axes), size, jnp.nan)

    return jax.tree_util.tree_map_with_path(norm, tree)


def unstack(tree: Any) -> Iterator[tuple[Path, int | None, Any]]:
    """Yields (path, layer, value) of each leaf; layer is None outside the layers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = tuple(key.key for key in path)
        if keys[0] == LAYERS:
            yield from ((keys, n, value) for n, value in enumerate(leaf))
        else:
            yield keys, None, leaf


def name(path: Path, n: int | None) -> str:
    """Returns a name such as layers[2]/feed_forward/in."""
    first, *others = path
    return "/".join([first if n is None else f"{first}[{n}]", *others])


def name_first(order: list[Path], bad: Any, grads: Any) -> str:
    """Names the first non-finite output or gradient, or else the largest gradient."""
    first = [path[0] for path in order].index(LAYERS)

    def position(leaf: tuple[Path, int | None, Any], length: int) -> tuple[int, ...]:
        path, n, _ = leaf
        same = [module[:length] == path[:length] for module in order]
        index = same.index(True) if True in same else -1
        # All modules of a layer precede the next layer.
        return (index,) if n is None else (first, n, index)

    if outputs := [leaf for leaf in unstack(bad) if leaf[-1]]:
        path, n, _ = min(outputs, key=lambda leaf: position(leaf, len(leaf[0])))
        method = "" if path[-1] == "__call__" else f".{path[-1]}"
        return f"the output of {name(path[:-1], n)}{method}"
    leaves = list(unstack(grads))
    if broken := [leaf for leaf in leaves if np.isnan(leaf[-1])]:
        path, n, _ = max(broken, key=lambda leaf: position(leaf, len(leaf[0]) - 1))
        return f"the gradient of the parameter {name(path, n)}"
    path, n, largest = max(leaves, key=lambda leaf: leaf[-1])
    with np.errstate(over="ignore"):
        squares = np.square([norm for *_, norm in leaves], dtype=np.float32)
        if np.isfinite(np.sum(squares)):
            return "none, with an empty memory and the parameters of the checkpoint"
    of = f"the gradient of the parameter {name(path, n)}"
    return f"a square, of {of} (norm {largest:.3g})"


class Diagnosis:
    """Ends a run that skips too many updates in a row, and names the cause."""

    def __init__(self, model: ModelConfig, config: TrainConfig):
        """Starts before the first call."""
        self.model, self.config = model, config
        self.calls: deque[Segment] = deque()  # whose metrics have not been fetched
        # The update that ends the run: its metrics, index in the call, and segments.
        self.update: tuple[dict[str, Any], int, Segment] | None = None

    def dispatched(self, segments: Segment) -> None:
        """Keeps the segments [S, ..] of a call until its metrics are fetched."""
        self.calls.append(segments)

    def fetched(self, step: int, updates: list[dict[str, Any]]) -> None:
        """Checks the metrics of the oldest call, made after `step` updates."""
        segments = self.calls.popleft()
        for u, metrics in enumerate(updates):
            if (
                not self.update
                and metrics["skipped_in_row"] >= self.config.max_bad_steps
            ):
                self.update = {"step": step + u, **metrics}, u, segments

    def found(self) -> bool:
        """Returns whether the run has to end."""
        return self.update is not None

    def raise_if_found(self, state: TrainState) -> None:
        """Raises BadNumbers if an update ends the run; save `state` before."""
        if not self.update:
            return
        update, u, segments = self.update
        where = f"the loss is {update['loss']:.4g}, the mean {update['mean_loss']:.4g}"
        if update["reason"] != REASONS[-1]:
            G = self.config.segments_per_update
            segments = jax.tree.map(lambda x: x[u * G : (u + 1) * G], segments)
            model, step = TransformerXL(self.model), update["step"]
            first = find_bad(model, self.config, state, step, segments)
            where = f"the first non-finite number: {first}"
        raise BadNumbers(
            f"update {update['step'] + 1} was skipped, number "
            f"{update['skipped_in_row']} in a row (train.max_bad_steps = "
            f"{self.config.max_bad_steps}), since {update['reason']}; {where}. No "
            f"skipped update has changed checkpoint {int(state.step)}"
        )
