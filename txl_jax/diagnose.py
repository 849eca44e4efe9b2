"""Where bad numbers come from: a second look at the updates that a run skips.

Dims: S segments in a call, G segments in an update, N layers, and those of `step`.
"""

import dataclasses
import functools
import itertools
from collections import deque
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.data.streams import Segment
from txl_jax.errors import BadNumbers
from txl_jax.guard import REASONS
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout, WordDropout
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.state import TrainState, abstract_params
from txl_jax.step import TrainConfig, segment_nll, sum_gradients

PROBES = "probes"  # the collection of what modules' outputs are like, [2] or [N, 2]
LAYERS = "layers"  # what is under this name is stacked over the layers
OUTPUT, GRADIENT = 0, 1  # the places of a probe

# The whole, and what makes no number bad by itself.
NAMELESS = (TransformerXL, Dropout, WordDropout)

Path = tuple[str, ...]


@jax.custom_vjp
def probe(x: Array, bad_2: Array) -> Array:
    """Returns x. The gradient of bad_2, whatever it holds, says what x is like.

    It is [1 if x is not finite, 1 if the gradient of x is not finite], and else zeros.
    """
    del bad_2
    return x


def _probe_forward(x: Array, bad_2: Array) -> tuple[Array, Array]:
    del bad_2
    return x, _is_bad(x)


def _probe_backward(bad: Array, grad: Array) -> tuple[Array, Array]:
    return grad, jnp.stack([bad, _is_bad(grad)])


def _is_bad(x: Array) -> Array:
    return 1 - jnp.isfinite(x).all().astype(jnp.float32)


probe.defvjp(_probe_forward, _probe_backward)


class Interceptor:
    """Sends what each module returns through its probe, wherever flax calls one.

    A probe that the model's variables lack is made. order: the modules, each with its
    method, as they return in the forward pass.
    """

    METHODS = ("__call__", "embed", "nll")

    def __init__(self) -> None:
        self.order: list[Path] = []

    def __call__(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Returns what the method does."""
        result = method(*args, **kwargs)
        module, name = context.module, context.method_name
        if name not in self.METHODS or isinstance(module, NAMELESS):
            return result
        if (*module.path, name) not in self.order:
            self.order.append((*module.path, name))
        bad_2 = module.scope.get_variable(PROBES, name)
        if bad_2 is None:
            bad_2 = jnp.zeros(2)
            module.scope.put_variable(PROBES, name, bad_2)
        return jax.tree.map(lambda x: probe(x, bad_2), result)


def make_probes(config: ModelConfig) -> tuple[Any, list[Path]]:
    """Returns the model's probes, all zero, and their order in the forward pass."""
    interceptor = Interceptor()
    # Modules are the same whatever the kernel, and this one takes any length.
    model = TransformerXL(dataclasses.replace(config, kernel="xla"))

    def make(params: Any) -> Any:
        tokens_BL, memory = jnp.zeros((1, 1), jnp.int32), Memory.empty(config, 1)
        with nn.intercept_methods(interceptor):
            _, variables = model.apply(
                {"params": params},
                *(tokens_BL, tokens_BL, memory),
                method="nll",
                mutable=[PROBES],
            )
        return variables[PROBES]

    shapes = jax.eval_shape(make, nn.unbox(abstract_params(config)))
    return jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), interceptor.order


def find_bad(
    model: TransformerXL,
    config: TrainConfig,
    state: TrainState,
    step: int,
    group: Segment,
) -> str:
    """Returns in words where the first number is that is not finite in an update.

    It is computed again: the update that followed `step` others, from the segments of
    its group [G, ..], with the state's parameters and an empty memory. The first is in
    the output of a module, in the order of the forward pass; else in the gradient of
    such an output, in the order of the backward pass; else in the gradient of the
    parameter where it is greatest. Layers are numbered from 0.
    """
    probes, order = make_probes(model.config)

    def nll_sum(
        watched: Any, memory: Memory, segment: Segment, key: Array
    ) -> tuple[Array, Memory]:
        variables = dict(zip(("params", PROBES), watched, strict=True))
        with nn.intercept_methods(Interceptor()):
            nll_BL, memory = segment_nll(
                model, variables, memory, segment, {"dropout": key}
            )
        return jnp.sum(nll_BL * segment.weights_SBL), memory

    def look(params: Any, rng: Array, step: Array, group: Segment) -> Any:
        memory = Memory.empty(model.config, config.batch_size)
        key = jax.random.fold_in(rng, step)
        total, _ = sum_gradients(
            nll_sum, (params, probes), memory, group, key, config.batch_chunk
        )
        grads, bad = total.grads
        grads = jax.tree.map(lambda grad: grad / total.tokens, grads)
        return bad, _norms(params), _norms(grads)

    # Every process reads all of it.
    run = jax.jit(look, out_shardings=state.step.sharding)
    bad, sizes, norms = jax.device_get(run(state.params, state.rng, step, group))
    broken = [name for name, size in _named(sizes) if np.isnan(size)]
    also = f"; the parameter {broken[0]} itself is not finite" if broken else ""
    return (_first_output(bad, order) or _greatest_gradient(norms)) + also


def _norms(tree: Any) -> Any:
    """Returns the norm of each leaf, [N] where it is stacked, float32.

    It is NaN where a number is not finite, infinite where only a square is not.
    """

    def norm(path: Any, x: Array) -> Array:
        axes = tuple(range(1 if path[0].key == LAYERS else 0, x.ndim))
        size = jnp.sqrt(jnp.sum(jnp.square(x), axes))
        return jnp.where(jnp.isfinite(x).all(axes), size, jnp.nan)

    return jax.tree_util.tree_map_with_path(norm, tree)


def _name(path: Path, n: int | None) -> str:
    """Returns a name such as layers[2]/feed_forward/in, for layer n."""
    first, *others = path
    return "/".join([first if n is None else f"{first}[{n}]", *others])


def _named(norms: Any) -> list[tuple[str, float]]:
    """Returns (parameter, norm), layer by layer."""
    found = []
    for path, norm in jax.tree_util.tree_leaves_with_path(norms):
        keys = tuple(key.key for key in path)
        stacked = enumerate(norm) if norm.ndim else [(None, norm)]
        found += [(_name(keys, n), value) for n, value in stacked]
    return found


def _first_output(bad: Any, order: list[Path]) -> str:
    """Returns what a probe found first, or ""."""
    seen: list[tuple[str, np.ndarray]] = []
    for _, group in itertools.groupby(order, key=lambda path: path[0] == LAYERS):
        probes = [
            (path, functools.reduce(dict.__getitem__, path, bad)) for path in group
        ]
        # The layers one after the other, each with all of its modules.
        layers = range(len(probes[0][1])) if probes[0][1].ndim > 1 else [None]
        for n in layers:
            for (*path, method), bad_2 in probes:
                name = _name(tuple(path), n)
                name += "" if method == "__call__" else f".{method}"
                seen.append((name, bad_2 if n is None else bad_2[n]))
    for name, bad_2 in seen:
        if bad_2[OUTPUT]:
            return f"the output of {name}"
    for name, bad_2 in reversed(seen):
        if bad_2[GRADIENT]:
            return f"the gradient of the output of {name}"
    return ""


def _greatest_gradient(norms: Any) -> str:
    """Returns whose gradient is not finite, or the greatest where its square is not."""
    named = _named(norms)
    for name, norm in named:
        if np.isnan(norm):
            return f"the gradient of the parameter {name}"
    name, greatest = max(named, key=lambda pair: pair[1])
    with np.errstate(over="ignore"):
        whole = np.sqrt(
            np.sum(np.square([norm for _, norm in named], dtype=np.float32))
        )
    if np.isfinite(whole):
        return "none, with an empty memory and the parameters of the checkpoint"
    return f"a square, of the gradient of the parameter {name} (norm {greatest:.3g})"


class Watch:
    """Follows a run's updates, call by call, for too many skipped in a row."""

    def __init__(self, model: ModelConfig, config: TrainConfig, step: int):
        """Starts before the first call, after `step` updates."""
        self.model = model
        self.config = config
        self.step = step
        self.calls: deque[Segment] = deque()  # those whose metrics are still to come
        self.found: dict[str, Any] | None = None  # the metrics that stop the run
        self.group: tuple[int, Segment] = (0, ())  # type: ignore[assignment]

    def dispatched(self, segments: Segment) -> None:
        """Takes the segments [S, ..] of a call to the device."""
        self.calls.append(segments)

    def fetched(self, updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Takes the metrics of the oldest call, and returns them."""
        segments = self.calls.popleft()
        for u, metrics in enumerate(updates):
            if (
                metrics["skipped_in_row"] >= self.config.max_bad_steps
                and not self.found
            ):
                self.found = {"step": self.step + u, **metrics}
                self.group = u, segments
        self.step += len(updates)
        return updates

    def stop_if_found(self, state: TrainState) -> None:
        """Raises BadNumbers if so; the state has just been saved."""
        if not self.found:
            return
        found, G = self.found, self.config.segments_per_update
        u, segments = self.group
        where = f"the loss is {found['loss']:.4g}, the mean {found['mean_loss']:.4g}"
        if found["reason"] != REASONS[-1]:
            group = jax.tree.map(lambda x: x[u * G : (u + 1) * G], segments)
            model = TransformerXL(self.model)
            first = find_bad(model, self.config, state, found["step"], group)
            where = f"the first number that is not finite: {first}"
        raise BadNumbers(
            f"update {found['step'] + 1} was skipped, number {found['skipped_in_row']} "
            f"in a row (train.max_bad_steps = {self.config.max_bad_steps}), since "
            f"{found['reason']}; {where}. No skipped update has changed checkpoint "
            f"{int(state.step)}"
        )
