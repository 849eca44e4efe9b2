"""A call to the device makes its updates in order, in any number of parts.

Dims: S segments in a call, U updates in a call, G segments in an update, C chunks of
the streams, B streams, L segment.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import tiny
from txl_jax.data.streams import Position, Streams
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.optim import make_average, make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Average, TrainState
from txl_jax.update.step import TrainStep, cast_layers, nll_sum, sum_gradients

B, L, G, C = 4, 4, 2, 2
PARAMS: Any = tiny.make_params()
PLAIN = tiny.CONFIG
DROPOUT = tiny.config(dropout=0.2, dropatt=0.2, mem_len=G * L)
# Some gradients are zero except for rounding: cosines of low frequencies are one at all
# distances, and the softmax ignores terms that all keys share. Adam would turn them
# into full updates if its epsilon were not far above rounding.
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, asgd_from=1)
with pytest.MonkeyPatch.context() as patch:
    patch.setattr("txl_jax.update.optim.EPSILON", 1e-3)
    ADAM, SCHEDULE = make_optimizer(OPTIM), make_schedule(OPTIM, 96)
AVERAGE = make_average(OPTIM)
# Its update is the gradient itself, so that gradients can be read off the parameters.
SGD = optax.with_extra_args_support(optax.identity())
SGD_RATE = 0.1  # with 1, the second update would amplify the rounding of the first
Step = Callable[[TrainState, Segment], tuple[TrainState, dict[str, jax.Array]]]


def make_config(updates: int = 1, **changes: Any) -> TrainConfig:
    """Returns a config of `updates` updates per call, in G x C parts each."""
    sizes = {"num_steps": 96, "eval_every": 96, "batch_size": B, "tgt_len": L}
    parts = {"segments_per_call": updates * G, "segments_per_update": G}
    return TrainConfig(**{**sizes, **parts, "batch_chunk": C, **changes})


def make_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformationExtraArgs = ADAM,
    batch_size: int = B,
    generator: str = "rbg",  # compiles fastest
) -> TrainState:
    """Returns a fresh state with the parameters of `tiny`."""
    params = tiny.make_params(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=jax.jit(optimizer.init)(params),
        memory=Memory.empty(model, batch_size),
        rng=jax.random.key(0, impl=generator),
        average=Average(params, jnp.zeros((), jnp.int32)),
    )


@functools.cache
def make_step(
    model: ModelConfig,
    config: TrainConfig,
    optimizer: optax.GradientTransformationExtraArgs = ADAM,
) -> Step:
    schedule = optax.constant_schedule(SGD_RATE) if optimizer is SGD else SCHEDULE
    network = TransformerXL(model)
    return jax.jit(TrainStep(network, optimizer, schedule, config, AVERAGE))


# One update, compiled once for all tests.
ONE_STEP = make_step(DROPOUT, make_config())


def make_segments(S: int, batch_size: int = B, half_loss: bool = False) -> Segment:
    """Returns S segments: 10 or 11 tokens in each stream, then the next epoch.

    The third segment is therefore a tail with 2 or 3 real tokens, and documents start
    with the fourth.
    """
    tokens = tiny.make_tokens(1, 10 * batch_size + batch_size // 2 + 1)[0]
    streams = Streams(tokens, batch_size, L, half_loss=half_loss)
    return streams.batch(Position(), S)[0]


def of_update(segments: Segment, u: int) -> Segment:
    return jax.tree.map(lambda x: x[u * G : (u + 1) * G], segments)


def numbers(state: TrainState) -> Any:
    """Returns the parts of the state that an update changes."""
    return state.params, state.opt_state, state.memory, state.step, state.average


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def nll_memory_and_gradient(params: Any, memory: Memory, segment: OneSegment) -> Any:
    """Returns ((nll of the scored tokens of one segment, memory), gradient)."""
    inputs_BL, targets_BL, weights_BL, first_BL, length_B = segment
    more: Any = {"first_BL": first_BL, "length_B": length_B, "method": "nll"}
    result: Any = TransformerXL(PLAIN).apply(
        {"params": params}, inputs_BL, targets_BL, memory, **more
    )
    return jnp.sum(result[0] * weights_BL), result[1]


def test_one_call_of_many_updates_equals_many_calls_of_one() -> None:
    """Except for rounding: quick compilation may fuse the same sums differently.

    `tests/promises/test_resume_is_exact.py` compares the bits of users' programs.
    """
    segments, state = make_segments(2 * G), make_state(DROPOUT)
    expected, expected_metrics = state, []
    for u in range(2):
        expected, metrics = ONE_STEP(expected, of_update(segments, u))
        expected_metrics.append(metrics)
    step = make_step(DROPOUT, make_config(updates=2))
    actual, metrics = step(state, segments)
    tiny.assert_close(numbers(actual), numbers(expected))
    stacked = jax.tree.map(lambda *x: np.concatenate(x), *expected_metrics)
    tiny.assert_close(metrics, stacked)
    assert not metrics["skipped"].any()
    # A skipped update does not affect the next one of its call.
    rolled = jax.tree.map(lambda x: np.roll(x, -1, axis=0), segments)
    _, metrics = step(poison_memory(state), rolled)
    assert metrics["skipped"].tolist() == [True, False]


def test_every_update_draws_different_dropout() -> None:
    """The mask depends only on the update's number, so a resumed run repeats it."""
    segments, state = make_segments(G), make_state(DROPOUT)

    def loss(step: int) -> float:
        at_step = dataclasses.replace(state, step=jnp.int32(step))
        return ONE_STEP(at_step, segments)[1]["loss"].item()

    assert len({loss(step) for step in range(4)}) == 4 and loss(3) == loss(3)


def test_segments_and_chunks_draw_different_dropout() -> None:
    """Every stream reads one segment twice: all copies have different masks."""
    twins = jax.tree.map(lambda x: x[[0] * G][:, [0] * B], make_segments(1))
    after, _ = ONE_STEP(make_state(DROPOUT), twins)
    assert isinstance(after.memory, Memory)
    dropped_BMD = np.asarray(after.memory.h_NBMD[0]) == 0
    copies = dropped_BMD.reshape(B * G, L, tiny.D)
    assert len({copy.tobytes() for copy in copies}) == len(copies)


@pytest.mark.parametrize("half_loss", [False, True])
def test_an_update_is_the_mean_over_its_scored_tokens(half_loss: bool) -> None:
    """There are two updates in parts; the second has a tail, so fewer tokens."""
    segments = make_segments(2 * G, half_loss=half_loss)
    state = make_state(PLAIN, SGD)
    step = make_step(PLAIN, make_config(updates=2), SGD)
    actual, metrics = step(state, segments)
    params: Any = PARAMS
    memory, tokens_U = Memory.empty(PLAIN, B), []
    for u in range(2):
        losses, gradients, tokens = 0.0, jax.tree.map(np.zeros_like, PARAMS), 0.0
        for s in range(G * u, G * u + G):
            segment = jax.tree.map(lambda x, s=s: x[s], OneSegment._make(segments))
            (loss, memory), gradient = nll_memory_and_gradient(params, memory, segment)
            losses += float(loss)
            gradients = jax.tree.map(np.add, gradients, gradient)
            tokens += segment.weights_BL.sum()
        mean = jax.tree.map(lambda x, tokens=tokens: x / tokens, gradients)
        params = jax.tree.map(lambda p, g: p - SGD_RATE * g, params, mean)
        norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(mean)))
        tiny.assert_close(metrics["loss"][u], losses / tokens)
        tiny.assert_close(metrics["grad_norm"][u], norm)
        tokens_U.append(tokens)
    assert metrics["tokens"].tolist() == tokens_U
    assert tokens_U[0] == G * B * L / (2 if half_loss else 1) > tokens_U[1]
    tiny.assert_close(actual.params, params)
    tiny.assert_close(actual.memory, memory)
    assert actual.step == 2
    # As in a copying task, where only answers are scored.
    nothing = segments._replace(weights_SBL=0 * segments.weights_SBL)
    after, metrics = step(state, nothing)
    assert metrics["skipped"].tolist() == [False, False]
    assert metrics["loss"].tolist() == metrics["tokens"].tolist() == [0, 0]
    tiny.assert_equal(after.params, state.params)
    tiny.assert_close(after.memory.filled_B, memory.filled_B)


def test_casting_the_layers_first_keeps_bfloat16_gradients() -> None:
    """A single part's gradients have half the bytes; several add up in float32."""
    model = TransformerXL(dataclasses.replace(PLAIN, dtype="bfloat16"))
    memory, key = Memory.empty(model.config, B), jax.random.key(0)
    one = make_segments(1)

    def grads(segments: Segment, parts: int) -> Any:
        config = make_config(batch_chunk=parts)
        return sum_gradients(model, PARAMS, memory, segments, key, config)[0].grads

    segment = jax.tree.map(lambda x: x[0], OneSegment._make(one))
    plain = jax.grad(functools.partial(nll_sum, model), has_aux=True)
    expected, _ = jax.jit(plain)(PARAMS, memory, segment, key)
    whole = jax.jit(functools.partial(grads, parts=1))(one)
    assert whole["layers"]["attention"]["q"].dtype == jnp.bfloat16
    tiny.assert_close(whole, expected, tiny.BFLOAT16)
    parts = jax.eval_shape(functools.partial(grads, parts=C), one)
    assert {x.dtype for x in jax.tree.leaves(parts)} == {jnp.dtype("float32")}


def test_the_matrices_of_fast_weights_are_not_rounded() -> None:
    params = tiny.make_params(dataclasses.replace(PLAIN, **tiny.FAST))
    cast = cast_layers(params, jnp.bfloat16)["layers"]["attention"]
    assert cast["q"].dtype == jnp.bfloat16
    tiny.assert_equal(cast["fast"], params["layers"]["attention"]["fast"])


def poison_memory(state: TrainState) -> TrainState:
    """Returns the state with a memory that makes the loss NaN."""
    assert isinstance(state.memory, Memory)
    h_NBMD = jnp.full(state.memory.h_NBMD.shape, jnp.nan, jnp.float32)
    memory = Memory(h_NBMD, jnp.full(B, state.memory.mem_len, jnp.int32))
    return dataclasses.replace(state, memory=memory)
