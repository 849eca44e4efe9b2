"""Finds the first non-finite number in an update that the guard skipped."""

import itertools
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
from txl_jax.update.step import make_nll_sum, sum_gradients

LAYERS = "layers/"  # arrays under this name are stacked over the layers
# The whole model, and modules that cannot introduce a bad number.
IGNORED = (TransformerXL, Dropout, WordDropout)


def sow_bad(calls: list[str]) -> Callable[..., Any]:
    """Returns a flax interceptor that sows whether each module's output is not finite.

    It appends the name of each call to `calls` when the call first returns.
    """

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        module, method = context.module, context.method_name
        if method in ("__call__", "embed", "nll") and not isinstance(module, IGNORED):
            if (name := "/".join([*module.path, method])) not in calls:
                calls.append(name)
            bad = [~jnp.isfinite(x).all() for x in jax.tree.leaves(result)]
            module.sow("intermediates", method, sum(bad), jnp.add, lambda: 0)
        return result

    return intercept


def find_bad(
    model: ModelConfig,
    config: TrainConfig,
    state: TrainState,
    step: int,
    segments: Segment,
) -> str:
    """Returns a description of the first non-finite number of an update.

    The update after `step` others is computed again from its G segments, with the
    state's parameters and an empty memory. Parameters come first, then outputs of
    modules, in the order of the forward pass, then gradients, in the order of the
    backward pass. If all are finite, only the memory or the norm of the gradients was
    not, and the largest gradient is named. Layers are numbered from 0.
    """
    calls: list[str] = []
    nll_sum = make_nll_sum(TransformerXL(model))

    def compute(params: Any, rng: Array, step: Array, segments: Segment) -> Any:
        memory = Memory.empty(model, config.batch_size)
        key = jax.random.fold_in(rng, step)
        parts = params, memory, segments, key, config.batch_chunk
        first = jax.tree.map(lambda x: x[0], segments)
        with nn.intercept_methods(sow_bad(calls)):
            _, (_, counts) = jax.eval_shape(nll_sum, params, memory, first, key)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
            total, _ = sum_gradients(nll_sum, *parts, counts=zeros)
        tokens = total.counts.pop("tokens")
        grads = jax.tree.map(lambda grad: grad / tokens, total.grads)
        return norms(params), total.counts, norms(grads)

    # Replicated, so that every process can read all of it.
    run = jax.jit(compute, out_shardings=state.step.sharding)
    sums = jax.device_get(run(state.params, state.rng, step, segments))
    params, outputs, grads = map(by_layer, sums)
    calls = in_order(calls, model.n_layer)
    for name, norm in params.items():
        if np.isnan(norm):
            return f"the parameter {name}"
    for call in calls:
        if outputs[call]:
            return f"the output of {call.removesuffix('/__call__')}"
    # Of a module's calls, the first counts; parameters outside of all modules are last.
    depth = {call.rpartition("/")[0]: i for i, call in reversed([*enumerate(calls)])}
    for name in sorted(
        grads, key=lambda x: depth.get(x.rpartition("/")[0], -1), reverse=True
    ):
        if np.isnan(grads[name]):
            return f"the gradient of the parameter {name}"
    largest = max(grads, key=grads.__getitem__)
    return (
        "none, with an empty memory and the parameters of the checkpoint; the largest "
        f"gradient is that of {largest} (norm {grads[largest]:.3g})"
    )


def norms(tree: Any) -> dict[str, Array]:
    """Returns the norm of each array by name, [N] if it is stacked over the layers.

    A norm is NaN if the array is not finite, infinite if only a square is not.
    """

    def norm(name: str, x: Array) -> Array:
        axes = tuple(range(name.startswith(LAYERS), x.ndim))
        size = jnp.sqrt(jnp.sum(jnp.square(x), axes))
        return jnp.where(jnp.isfinite(x).all(axes), size, jnp.nan)

    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return {name: norm(name, x) for name, x in flat.items()}


def by_layer(sums: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers by names such as layers[2]/feed_forward/in/bias."""
    return {
        name.replace(LAYERS, f"layers[{n}]/"): number
        for name, numbers in sums.items()
        for n, number in enumerate(np.atleast_1d(numbers))
    }


def in_order(calls: list[str], n_layer: int) -> list[str]:
    """Returns the names of all calls, layer by layer."""
    result = []
    for stacked, group in itertools.groupby(calls, lambda x: x.startswith(LAYERS)):
        names = list(group)
        for n in range(n_layer if stacked else 1):
            result += [name.replace(LAYERS, f"layers[{n}]/") for name in names]
    return result


class Diagnosis:
    """Ends a run that skips too many updates in a row, and names the cause."""

    def __init__(self, model: ModelConfig, config: TrainConfig):
        self.model, self.config = model, config
        # The update that ends the run: its metrics, index in the call, and segments.
        self.update: tuple[dict[str, Any], int, Segment] | None = None

    def fetched(
        self, step: int, updates: list[dict[str, Any]], segments: Segment
    ) -> None:
        """Checks the updates of a call, made after `step` others from its segments."""
        for u, metrics in enumerate(updates):
            in_row = metrics["skipped_in_row"]
            if not self.update and in_row >= self.config.max_bad_steps:
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
            first = find_bad(self.model, self.config, state, update["step"], segments)
            where = f"the first non-finite number: {first}"
        raise BadNumbers(
            f"update {update['step'] + 1} was skipped, number "
            f"{update['skipped_in_row']} in a row (train.max_bad_steps = "
            f"{self.config.max_bad_steps}), since {update['reason']}; {where}. No "
            f"skipped update has changed checkpoint {int(state.step)}"
        )
