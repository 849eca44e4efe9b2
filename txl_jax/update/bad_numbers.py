"""Finds the first non-finite number in an update that the guard skipped."""

from collections import deque
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.traverse_util
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
    bad, sizes, grads = jax.device_get(run(state.params, state.rng, step, segments))
    broken = [name for name, size in named(sizes).items() if np.isnan(size)]
    also = f"; the parameter {broken[0]} itself is not finite" if broken else ""
    calls = forward_order(order, model.config.n_layer)
    return find_first(calls, named(bad), named(grads)) + also


def norms(tree: Any) -> Any:
    """Returns the norm of each leaf, [N] if it is stacked over the layers, float32.

    A norm is NaN if the leaf is not finite, infinite if only a square is not.
    """

    def norm(path: Any, x: Array) -> Array:
        axes = tuple(range(1 if path[0].key == LAYERS else 0, x.ndim))
        size = jnp.sqrt(jnp.sum(jnp.square(x), axes))
        return jnp.where(jnp.isfinite(x).all(axes), size, jnp.nan)

    return jax.tree_util.tree_map_with_path(norm, tree)


def named(tree: Any) -> dict[str, Any]:
    """Returns the numbers of a tree by names such as layers[2]/feed_forward/in/bias."""
    return {
        name(path, n): number
        for path, leaf in flax.traverse_util.flatten_dict(tree).items()
        for n, number in enumerate(np.atleast_1d(leaf))
    }


def name(path: Path, n: int) -> str:
    """Returns the name of a path; n is ignored outside the layers."""
    first, *others = path
    return "/".join([f"{first}[{n}]" if first == LAYERS else first, *others])


def forward_order(order: list[Path], n_layer: int) -> list[str]:
    """Returns the names of all calls of modules, layer by layer."""
    layers = [path for path in order if path[0] == LAYERS]
    others = [name(path, 0) for path in order if path[0] != LAYERS]
    first = order.index(layers[0])
    calls = [name(path, n) for n in range(n_layer) for path in layers]
    return others[:first] + calls + others[first:]


def find_first(calls: list[str], bad: dict[str, int], grads: dict[str, float]) -> str:
    """Names the first non-finite output or gradient, or else the largest gradient."""
    for call in calls:
        if bad[call]:
            module, _, method = call.rpartition("/")
            return f"the output of {module}" + f".{method}".removesuffix(".__call__")
    # Parameters outside of all modules are the last of the backward pass.
    modules = dict.fromkeys(["", *(call.rpartition("/")[0] for call in calls)])
    for module in reversed(modules):
        for parameter, norm in grads.items():
            if parameter.rpartition("/")[0] == module and np.isnan(norm):
                return f"the gradient of the parameter {parameter}"
    with np.errstate(over="ignore"):
        if np.isfinite(np.sum(np.square([*grads.values()], dtype=np.float32))):
            return "none, with an empty memory and the parameters of the checkpoint"
    largest = max(grads, key=grads.__getitem__)
    of = f"the gradient of the parameter {largest}"
    return f"a square, of {of} (norm {grads[largest]:.3g})"


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
