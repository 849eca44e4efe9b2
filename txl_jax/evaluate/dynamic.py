"""Dynamic evaluation: the parameters adapt to the text that they are evaluated on.

After each segment has been scored, its gradient changes the parameters (Krause et al.
2019, "Dynamic evaluation of Transformer language models"):

    theta <- theta - lr g / (r + EPSILON) + min(decay r, 1) (theta_0 - theta)

g is the gradient of the segment's mean nll, theta_0 the trained parameters. For "rms",
r = sqrt(s) / mean(sqrt(s)): s is the mean of g^2 over segments of the training split,
and the mean is over all parameters. For "sgd", r is 1 and EPSILON is 0. The memory
holds hidden states, as in training, since keys and values depend on the parameters.
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
from txl_jax.evaluate.reader import run_calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
from txl_jax.model.segment import OneSegment, Segment, only
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.programs import Program
from txl_jax.sharding.rules import place_segments
from txl_jax.update.step import nll_sum

EPSILON = 1e-3

Carry = tuple[Params, Memory]  # parameters, or arrays of the same shapes


class Rule(NamedTuple):
    """The constants of dynamic evaluation's updates."""

    trained: Params
    rms: Params
    lr: float
    decay: float
    epsilon: float


def model_without_dropout(model_config: ModelConfig, config: EvalConfig) -> ModelConfig:
    """Returns the model of evaluation, whose gradients then match its scores."""
    model = evaluation_model(model_config, config)
    return dataclasses.replace(
        model, dropout=0.0, outer_dropout=0.0, dropatt=0.0, word_dropout=0.0
    )


def gradient(
    config: ModelConfig, params: Params, memory: Memory, segment: OneSegment
) -> tuple[Params, Array, Memory]:
    """Returns (gradient of the mean nll, summed nll, memory) of one segment."""
    nll_of = functools.partial(nll_sum, TransformerXL(config))
    grad = jax.value_and_grad(nll_of, has_aux=True)
    (nll, outcome), grads = grad(params, memory, segment, jax.random.key(0))
    tokens = jnp.maximum(outcome.tokens, 1)
    return jax.tree.map(lambda g: g / tokens, grads), nll, outcome.memory


def add_squares(
    config: ModelConfig, carry: Carry, params: Params, segments: Segment
) -> tuple[Carry, Array]:
    """Returns ((sums of squared gradients, memory), nll) after one more segment."""
    squares, memory = carry
    grads, nll, memory = gradient(config, params, memory, only(segments))
    squares = jax.tree.map(lambda total, g: total + g * g, squares, grads)
    return (squares, memory), nll


def adapt(
    config: ModelConfig, carry: Carry, rule: Rule, segments: Segment
) -> tuple[Carry, Array]:
    """Scores one segment, then updates: returns ((parameters, memory), nll)."""
    trained, rms, lr, decay, epsilon = rule

    def update(theta: Array, theta_0: Array, g: Array, r: Array) -> Array:
        pull = jnp.minimum(decay * r, 1) * (theta_0 - theta)
        return theta - lr * g / (r + epsilon) + pull

    params, memory = carry
    grads, nll, memory = gradient(config, params, memory, only(segments))
    return (jax.tree.map(update, params, trained, grads, rms), memory), nll


def beside_memory(
    config: ModelConfig, params: Params, copy: Callable[[Array], Array]
) -> Carry:
    """Returns (a copy of the parameters, the empty memory of one stream)."""
    start = jax.jit(lambda x: (jax.tree.map(copy, x), Memory.empty(config, 1)))
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
    add = functools.partial(add_squares, model_config)
    program = Program("the gradients of segments", add, carries=True, donates=True)
    carry = beside_memory(model_config, params, jnp.zeros_like)
    placed = (place_segments(mesh, each) for each in segments)
    for after, _ in run_calls(program, carry, params, placed):
        carry = after
    return to_roots(carry[0])


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
        self.config, self.mesh, self.rms = config, mesh, rms
        adapt_model = functools.partial(adapt, self.model)
        self.program = Program(
            "the dynamic evaluation step", adapt_model, carries=True, donates=True
        )

    def at_rates(self, config: EvalConfig) -> "Adaptation":
        """Returns an adaptation with the rates of `config`, and the same program."""
        other = copy.copy(self)
        other.config = config
        return other

    def _begin(self, params: Params) -> tuple[Carry, Rule]:
        config, rms = self.config, self.rms
        if rms is None:
            rms = jax.tree.map(lambda _: 1.0, params)
        epsilon = EPSILON if config.dynamic == "rms" else 0.0
        rule = Rule(params, rms, config.dynamic_lr, config.dynamic_decay, epsilon)
        return beside_memory(self.model, params, jnp.copy), rule

    def prepare(self, params: Params, segments: Iterable[Segment]) -> None:
        """Compiles the program of `read` for these parameters and segments."""
        self.program.compile(*self._begin(params), next(self._place(segments)))

    def read(self, params: Params, segments: Iterable[Segment]) -> Iterator[Array]:
        """Yields the nll, in nats, of every segment; `params` keep their values."""
        calls = run_calls(self.program, *self._begin(params), self._place(segments))
        return (nll for _, nll in calls)

    def _place(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        return (place_segments(self.mesh, each) for each in segments)
