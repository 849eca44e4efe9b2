"""Finds the first non-finite number in an update that the guard skipped."""

from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.errors import BadNumbers
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, WordDropout
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import empty_memory
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.guard import REASONS
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import TrainState
from txl_jax.update.step import sum_gradients

LAYERS = "layers/"  # arrays under this name are stacked over the layers
# The whole model, and modules that cannot introduce a bad number.
IGNORED = (TransformerXL, Dropout, WordDropout)


def find_bad(
    model: ModelConfig,
    config: TrainConfig,
    state: TrainState,
    step: int,
    segments: Segment,
) -> str:
    """Returns a description of the first non-finite number of an update.

    The update after `step` others is computed again from its G segments, with the
    state's parameters and an empty memory. Outputs of modules come first, in the order
    of the forward pass, then norms of gradients, in the order of the backward pass.
    Layers are numbered from 0.
    """
    calls: dict[str, int] = {}  # methods of modules, numbered in order of return

    def sow_bad(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        module, method = context.module, context.method_name
        if method in ("__call__", "embed", "nll") and not isinstance(module, IGNORED):
            calls.setdefault("/".join([*module.path, method]), len(calls))
            bad = [~jnp.isfinite(x).all() for x in jax.tree.leaves(result)]
            module.sow("intermediates", method, sum(bad), jnp.add, lambda: 0)
        return result

    def compute(params: Params, rng: Array, step: Array, segments: Segment) -> Any:
        memory = empty_memory(model, config.batch_size)
        key = jax.random.fold_in(rng, step)
        network = TransformerXL(model)
        with nn.intercept_methods(sow_bad):
            sums = sum_gradients(network, params, memory, segments, key, config)
        tokens = jnp.maximum(sums.tokens, 1)  # as in `make_train_step`
        bad_grads = {}
        for name, grad in flax.traverse_util.flatten_dict(sums.grads, sep="/").items():
            axes = tuple(range(name.startswith(LAYERS), grad.ndim))
            square = jnp.sum(jnp.square(grad / tokens), axes)
            bad_grads[name] = ~jnp.isfinite(square)
        return sums.sown, bad_grads

    # Replicated, so that every process can read all of it.
    run = jax.jit(compute, out_shardings=state.step.sharding)
    bad = jax.device_get(run(state.params, state.rng, step, segments))
    outputs, grads = (in_order(each, calls) for each in bad)
    if outputs:
        return f"the output of {outputs[0].removesuffix('/__call__')}"
    if grads:
        return f"the norm of the gradient of {grads[-1]}"
    return "none, with an empty memory and the parameters of the checkpoint"


def in_order(bad: dict[str, Any], calls: dict[str, int]) -> list[str]:
    """Returns the names that are marked as bad, in the order of the forward pass.

    Layers have names of their own, such as layers[2]/feed_forward/in/bias.
    """
    # A module's first call gives the place of its parameters.
    modules = {call.rpartition("/")[0]: i for call, i in reversed(calls.items())}
    first_layer = min(i for call, i in calls.items() if call.startswith(LAYERS))
    names = []
    for name, marks in bad.items():
        i = calls.get(name, modules.get(name.rpartition("/")[0], -1))
        # With memory tokens, outputs of layers are also stacked over segments.
        by_layer = tuple(range(np.ndim(marks) - name.startswith(LAYERS)))
        for n in np.flatnonzero(np.any(marks, by_layer)):
            at = (first_layer, n, i) if name.startswith(LAYERS) else (i, 0, 0)
            names.append((at, name.replace(LAYERS, f"layers[{n}]/")))
    return [name for _, name in sorted(names)]


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

    def ends(self) -> bool:
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
