"""Dynamic evaluation: the parameters adapt to the text that they are evaluated on.

After each segment has been scored, its gradient changes the parameters (Krause et al.
2019, "Dynamic evaluation of Transformer language models"):

    theta <- theta - lr g / (r + EPSILON) + min(decay r, 1) (theta_0 - theta)

g is the gradient of the segment's mean nll, theta_0 the trained parameters. For "rms",
r = sqrt(s) / mean(sqrt(s)): s is the mean of g^2 over segments of the training split,
and the mean is over all parameters. For "sgd", r is 1 and EPSILON is 0. The memory
holds hidden states, as in training, since keys and values depend on the parameters.

Dims: S segments in one call, B = 1 stream, L segment.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import empty_memory
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.step import nll_sum

EPSILON = 1e-3

Carry = tuple[Params, MemoryLike]  # parameters, or numbers of the same shapes


class Rule(NamedTuple):
    """What every update of dynamic evaluation reads."""

    trained: Params
    rms: Params
    lr: float
    decay: float
    epsilon: float


def model_without_dropout(model_config: ModelConfig, config: EvalConfig) -> ModelConfig:
    """Returns the model of evaluation, whose gradients are those of its scores."""
    model = evaluation_model(model_config, config)
    return dataclasses.replace(model, dropout=0.0, dropatt=0.0, word_dropout=0.0)


def gradient(
    config: ModelConfig, params: Params, memory: MemoryLike, segment: OneSegment
) -> tuple[Params, Array, MemoryLike]:
    """Returns (gradient of the mean nll, summed nll, memory) of one segment."""
    nll_of = functools.partial(nll_sum, TransformerXL(config))
    grad = jax.value_and_grad(nll_of, has_aux=True)
    (nll, (tokens, memory)), grads = grad(params, memory, segment, jax.random.key(0))
    return jax.tree.map(lambda g: g / jnp.maximum(tokens, 1), grads), nll, memory


def add_squares(
    config: ModelConfig, params: Params, carry: Carry, segments: Segment
) -> tuple[Array, Carry]:
    """Returns (nll_S, (sums of squared gradients, memory)) after S more segments."""

    def add(carry: Carry, segment: OneSegment) -> tuple[Carry, Array]:
        squares, memory = carry
        grads, nll, memory = gradient(config, params, memory, segment)
        squares = jax.tree.map(lambda total, g: total + g * g, squares, grads)
        return (squares, memory), nll

    return jax.lax.scan(add, carry, OneSegment._make(segments))[::-1]


def adapt(
    config: ModelConfig, rule: Rule, carry: Carry, segments: Segment
) -> tuple[Array, Carry]:
    """Scores S segments, and updates the parameters after each one.

    Returns (nll_S, (parameters, memory)).
    """
    trained, rms, lr, decay, epsilon = rule

    def update(theta: Array, theta_0: Array, g: Array, r: Array) -> Array:
        pull = jnp.minimum(decay * r, 1) * (theta_0 - theta)
        return theta - lr * g / (r + epsilon) + pull

    def read_one(carry: Carry, segment: OneSegment) -> tuple[Carry, Array]:
        params, memory = carry
        grads, nll, memory = gradient(config, params, memory, segment)
        return (jax.tree.map(update, params, trained, grads, rms), memory), nll

    return jax.lax.scan(read_one, carry, OneSegment._make(segments))[::-1]


def beside_memory(
    config: ModelConfig, params: Params, copy: Callable[[Array], Array]
) -> Carry:
    """Returns (a copy of the parameters, the empty memory of one stream)."""
    start = jax.jit(lambda x: (jax.tree.map(copy, x), empty_memory(config, 1)))
    return start(params)


def root_mean_squares(
    model_config: ModelConfig,
    config: EvalConfig,
    mesh: Mesh,
    params: Params,
    segments: Iterable[Segment],
) -> Any:
    """Returns r of every parameter, from consecutive segments of the training split."""
    model_config = model_without_dropout(model_config, config)
    step = functools.partial(add_squares, model_config)
    calls = Calls("the gradients of segments", step, mesh, donate=(1,))
    carry = beside_memory(model_config, params, jnp.zeros_like)
    for _ in calls.outputs(params, carry, segments):
        pass
    return to_roots(calls.carry[0])


@jax.jit
def to_roots(squares: Params) -> Params:
    """Returns r of every parameter from sums of squares; their number cancels."""
    roots = jax.tree.map(jnp.sqrt, squares)
    leaves = jax.tree.leaves(roots)
    mean = sum(map(jnp.sum, leaves)) / sum(leaf.size for leaf in leaves)
    return jax.tree.map(lambda x: x / mean, roots)


class Adaptation:
    """Reads one stream, to which the parameters adapt.

    rms: r of every parameter; None = 1, for "sgd".
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EvalConfig,
        mesh: Mesh,
        rms: Params | None,
    ) -> None:
        self.model = model_without_dropout(model_config, config)
        self.config, self.rms = config, rms
        step = functools.partial(adapt, self.model)
        self.calls = Calls("the dynamic evaluation step", step, mesh, donate=(1,))

    def at_rates(self, config: EvalConfig) -> "Adaptation":
        """Returns an adaptation with the rates of `config`, and the same program."""
        other = copy.copy(self)
        other.config = config
        return other

    def _start(self, params: Params) -> tuple[Rule, Carry]:
        config, rms = self.config, self.rms
        if rms is None:
            rms = jax.tree.map(lambda _: 1.0, params)
        epsilon = EPSILON if config.dynamic == "rms" else 0.0
        rule = Rule(params, rms, config.dynamic_lr, config.dynamic_decay, epsilon)
        return rule, beside_memory(self.model, params, jnp.copy)

    def prepare(self, params: Params, segments: Iterable[Segment]) -> None:
        """Compiles what `read` runs for these parameters and segments."""
        self.calls.compile(*self._start(params), next(iter(segments)))

    def read(self, params: Params, segments: Iterable[Segment]) -> Iterator[Array]:
        """Yields nll_S, in nats, of every call; `params` keep their values."""
        return self.calls.outputs(*self._start(params), segments)
