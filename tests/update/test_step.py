"""A call to the device is its updates one after the other, however it is cut.

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
from txl_jax.data.streams import Position, Segment, Streams
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, place_segments
from txl_jax.update.guard import REASONS
from txl_jax.update.init import init_state
from txl_jax.update.optim import make_average, make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Average, TrainState
from txl_jax.update.step import (
    join_streams,
    make_train_step,
    split_streams,
)

B, L, C = 4, 4, 2
PARAMS = tiny.make_params()
PLAIN = tiny.CONFIG
DROPOUT = tiny.config(dropout=0.2, dropatt=0.2)
# Some gradients are zero but for rounding: cosines of low frequencies are one at all
# distances, and the softmax ignores what all keys share. Adam would make full updates
# of them, were its epsilon not far above rounding.
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, epsilon=1e-3, asgd_from=1)
ADAM, SCHEDULE = make_optimizer(OPTIM), make_schedule(OPTIM, 96)
AVERAGE = make_average(OPTIM)
# Its update is the gradient itself, so that gradients can be read off the parameters.
SGD = optax.identity()
SGD_RATE = 0.1  # of 1, the second update would make much of the first one's rounding
Step = Callable[[TrainState, Segment], tuple[TrainState, dict[str, jax.Array]]]


def make_config(**changes: Any) -> TrainConfig:
    """Returns a config of this file's sizes, with the changes."""
    fields = {"num_steps": 96, "batch_size": B, "tgt_len": L} | changes
    return TrainConfig(**fields, log_every=96, eval_every=96)


def make_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation = ADAM,
    batch_size: int = B,
    generator: str = "rbg",  # compiles fastest
) -> TrainState:
    """Returns a fresh state, but for its parameters, which are tiny's."""
    params = tiny.make_params(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=Memory.empty(model, batch_size),
        rng=jax.random.key(0, impl=generator),
        average=Average(params, jnp.zeros((), jnp.int32)),
    )


@functools.cache
def make_step(
    model: ModelConfig,
    config: TrainConfig,
    optimizer: optax.GradientTransformation = ADAM,
) -> Step:
    """Returns the train step, compiled once for all tests."""
    schedule = optax.constant_schedule(SGD_RATE) if optimizer is SGD else SCHEDULE
    network = TransformerXL(model)
    return tiny.jit(make_train_step(network, optimizer, schedule, config, AVERAGE))


# One segment with dropout: shared, since it takes long to compile.
ONE_STEP = make_step(DROPOUT, make_config(batch_chunk=C))


def make_segments(S: int, batch_size: int = B, half_loss: bool = False) -> Segment:
    """Returns S segments: 10 or 11 tokens in each stream, then the next epoch.

    So the third segment is a tail, with 2 or 3 real tokens, and the fourth begins
    documents.
    """
    tokens = tiny.make_tokens(1, 10 * batch_size + batch_size // 2 + 1)[0]
    streams = Streams(tokens, batch_size, L, S, half_loss=half_loss)
    return streams.batch(Position())[0]


def only(segments: Segment, s: int) -> Segment:
    """Returns segment s alone, S = 1."""
    return jax.tree.map(lambda x: x[s : s + 1], segments)


def numbers(state: TrainState) -> Any:
    """Returns what updates change."""
    return state.params, state.opt_state, state.memory, state.step, state.average


def nll_sum(params: Any, memory: Memory, segments: Segment) -> Any:
    """Returns (summed nll of the scored tokens of one segment, memory)."""
    segment = jax.tree.map(lambda x: x[0], segments)
    result: Any = TransformerXL(PLAIN).apply(
        {"params": params},
        segment.inputs_SBL,
        segment.targets_SBL,
        memory,
        first_BL=segment.first_SBL,
        length_B=segment.length_SB,
        method="nll",
    )
    nll_BL, memory = result
    return jnp.sum(nll_BL * segment.weights_SBL), memory


# How a call is cut.


def test_one_call_of_s_segments_is_s_calls_of_one() -> None:
    """But for rounding: two programs for the same sums may fuse them otherwise."""
    S, segments, state = 4, make_segments(4), make_state(DROPOUT)
    expected, expected_metrics = state, []
    for s in range(S):
        expected, metrics = ONE_STEP(expected, only(segments, s))
        expected_metrics.append(metrics)
    config = make_config(segments_per_call=S, batch_chunk=C)
    actual, metrics = make_step(DROPOUT, config)(state, segments)
    tiny.assert_close(numbers(actual), numbers(expected))
    stacked = jax.tree.map(lambda *x: np.concatenate(x), *expected_metrics)
    tiny.assert_close(metrics, stacked)
    assert not metrics["skipped"].any()


def test_every_update_draws_different_dropout() -> None:
    """By its number alone, so that a restored run draws the same."""
    segments, state = make_segments(1), make_state(DROPOUT)

    def loss(step: int) -> float:
        at_step = dataclasses.replace(state, step=jnp.asarray(step))
        return ONE_STEP(at_step, segments)[1]["loss"].item()

    assert len({loss(step) for step in range(4)}) == 4
    assert loss(3) == loss(3)


def test_every_part_of_an_update_draws_different_dropout() -> None:
    """One segment, twice, in every stream: dropout differs between them."""
    model = tiny.config(dropout=0.2, mem_len=2 * L)
    config = make_config(segments_per_call=2, segments_per_update=2, batch_chunk=C)
    twins = jax.tree.map(lambda x: x[[0, 0]][:, [0] * B], make_segments(1))
    after, _ = make_step(model, config)(make_state(model), twins)
    dropped_BMD = np.asarray(after.memory.h_NBMD[0]) == 0
    copies = dropped_BMD.reshape(B * 2, L, tiny.D)
    assert len({copy.tobytes() for copy in copies}) == len(copies)


def test_training_without_memory() -> None:
    model = tiny.config(mem_len=0)
    state, segments = make_state(model), make_segments(1)
    after, metrics = make_step(model, make_config(batch_chunk=C))(state, segments)
    assert metrics["skipped"].tolist() == [False]
    tiny.assert_equal(after.memory.filled_B, np.zeros(B))


@pytest.mark.parametrize("half_loss", [False, True])
def test_an_update_is_the_mean_over_its_scored_tokens(half_loss: bool) -> None:
    """Two updates of two segments each; the second has a tail: fewer tokens."""
    G, segments = 2, make_segments(4, half_loss=half_loss)
    state = make_state(PLAIN, SGD)
    config = make_config(segments_per_call=4, segments_per_update=G)
    actual, metrics = make_step(PLAIN, config, SGD)(state, segments)
    grad = tiny.jit(jax.value_and_grad(nll_sum, has_aux=True))
    params: Any = PARAMS
    memory, tokens_U = Memory.empty(PLAIN, B), []
    for u in range(2):
        losses, gradients, tokens = 0.0, jax.tree.map(np.zeros_like, PARAMS), 0.0
        for s in (G * u, G * u + 1):
            (loss, memory), gradient = grad(params, memory, only(segments, s))
            losses += float(loss)
            gradients = jax.tree.map(np.add, gradients, gradient)
            tokens += segments.weights_SBL[s].sum()
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


def test_an_update_without_scored_tokens_changes_no_parameter() -> None:
    """As in a copying task, of which only answers are scored."""
    segments, state = make_segments(4), make_state(PLAIN, SGD)
    nothing = segments._replace(weights_SBL=0 * segments.weights_SBL)
    config = make_config(segments_per_call=4, segments_per_update=2)
    after, metrics = make_step(PLAIN, config, SGD)(state, nothing)
    assert metrics["skipped"].tolist() == [False, False]
    assert metrics["loss"].tolist() == metrics["tokens"].tolist() == [0, 0]
    tiny.assert_equal(after.params, state.params)
    assert (np.asarray(after.memory.filled_B) > 0).all()


def test_chunks_of_the_streams_make_the_update_of_them_all() -> None:
    segments, state = make_segments(3), make_state(PLAIN)
    whole, chunked = (make_config(segments_per_call=3, batch_chunk=c) for c in (1, C))
    expected, expected_metrics = make_step(PLAIN, whole)(state, segments)
    actual, metrics = make_step(PLAIN, chunked)(state, segments)
    tiny.assert_close(actual.params, expected.params)
    tiny.assert_close(actual.memory, expected.memory)
    tiny.assert_close(metrics, expected_metrics)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_chunk_c_has_every_cth_stream(axis: int) -> None:
    x = np.random.default_rng(0).normal(size=(6, 6, 6, 2))
    chunks = split_streams(jnp.asarray(x), axis, C)
    for c in range(C):
        every = [slice(None)] * axis + [slice(c, None, C)]
        np.testing.assert_array_equal(chunks[c], jnp.asarray(x)[tuple(every)])
    np.testing.assert_array_equal(join_streams(chunks, axis), jnp.asarray(x))


# Updates that are not finite.


def poison_memory(state: TrainState) -> TrainState:
    """Returns the state with a memory that makes the loss not a number."""
    memory = jax.tree.map(jnp.ones_like, state.memory)
    memory = dataclasses.replace(memory, h_NBMD=memory.h_NBMD * jnp.nan)
    return dataclasses.replace(state, memory=memory)


def test_an_update_that_is_not_finite_is_not_made() -> None:
    # The first of them begins no document, so that it reads the memory.
    segments = jax.tree.map(lambda x: x[1:], make_segments(4))
    state, _ = ONE_STEP(make_state(DROPOUT), only(segments, 0))
    after, metrics = ONE_STEP(poison_memory(state), only(segments, 0))
    assert metrics["skipped"].tolist() == [True]
    assert not np.isfinite(metrics["loss"]).any()
    empty = Memory.empty(DROPOUT, B)
    unchanged = dataclasses.replace(state, step=jnp.asarray(2), memory=empty)
    tiny.assert_equal(numbers(after), numbers(unchanged))
    # The next update goes on from there.
    expected, _ = ONE_STEP(unchanged, only(segments, 1))
    later, metrics = ONE_STEP(after, only(segments, 1))
    assert metrics["skipped"].tolist() == [False]
    tiny.assert_equal(numbers(later), numbers(expected))
    # The mean of the parameters is of the updates that were made.
    made = jax.tree.map(lambda a, b: (a + b) / 2, state.params, later.params)
    tiny.assert_close(later.average.params, made)
    assert later.average.count == 2


def test_after_a_skip_the_memory_is_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a stream starts with visible zeros."""
    empty = Memory.empty.__func__  # type: ignore[attr-defined]

    def visible(cls: type[Memory], config: ModelConfig, batch_size: int) -> Memory:
        assert config.initial_memory == "zeros"
        filled_B = jnp.full(batch_size, config.mem_len, jnp.int32)
        return dataclasses.replace(empty(cls, config, batch_size), filled_B=filled_B)

    monkeypatch.setattr(Memory, "empty", classmethod(visible))
    model = tiny.config(initial_memory="zeros")
    state = make_state(model)
    after, metrics = make_step(model, make_config())(
        poison_memory(state), only(make_segments(2), 1)
    )
    assert metrics["skipped"].tolist() == [True]
    assert after.memory.filled_B.tolist() == [model.mem_len] * B
    tiny.assert_equal(after.memory, state.memory)


def test_a_state_without_an_average_trains_equally() -> None:
    segments, state = make_segments(1), make_state(PLAIN)
    expected, _ = make_step(PLAIN, make_config())(state, segments)
    step = make_train_step(TransformerXL(PLAIN), ADAM, SCHEDULE, make_config())
    after, _ = tiny.jit(step)(dataclasses.replace(state, average=()), segments)
    assert after.average == ()
    assert after.evaluated is after.params
    tiny.assert_close(after.params, expected.params)
    assert expected.evaluated is expected.average.params


def test_one_update_of_a_call_is_skipped_alone() -> None:
    segments = jax.tree.map(lambda x: np.roll(x, -1, axis=0), make_segments(4))
    config = make_config(segments_per_call=4, batch_chunk=C)
    poisoned = poison_memory(make_state(DROPOUT))
    _, metrics = make_step(DROPOUT, config)(poisoned, segments)
    assert metrics["skipped"].tolist() == [True, False, False, False]


def test_an_infinite_gradient_alone_is_not_applied() -> None:
    """The feed-forward's zero hides its huge input from the loss, not the gradient."""
    params = jax.tree.map(np.copy, PARAMS)
    params["layers"]["feed_forward"]["in"]["kernel"] *= 1e25
    params["layers"]["feed_forward"]["out"]["kernel"] *= 0
    state = dataclasses.replace(make_state(DROPOUT), params=params)
    after, metrics = ONE_STEP(state, make_segments(1))
    assert np.isfinite(metrics["loss"]).all()
    assert not np.isfinite(metrics["grad_norm"]).any()
    assert metrics["skipped"].tolist() == [True]
    assert REASONS[metrics["reason"].item()] == (
        "the norm of its gradient is not finite"
    )
    tiny.assert_equal(after.params, params)


# Meshes.


def three_updates(
    mesh_config: MeshConfig, devices: int, model: ModelConfig
) -> tuple[Any, Any]:
    """Returns the numbers of the state, and the metrics, after training on a mesh."""
    config = make_config(batch_size=16, segments_per_call=3, batch_chunk=C)
    mesh = make_mesh(mesh_config, jax.devices()[:devices])
    _, places = init_state(model, ADAM, config.batch_size, 0, mesh, averages=True)
    # The generator that every run has.
    state = make_state(model, ADAM, config.batch_size, "threefry2x32")
    step = tiny.jit(
        make_train_step(TransformerXL(model), ADAM, SCHEDULE, config, AVERAGE),
        out_shardings=(places, None),
    )
    segments: Any = place_segments(mesh, make_segments(3, config.batch_size))
    state, metrics = step(jax.device_put(state, places), segments)
    return jax.device_get(numbers(state)), jax.device_get(metrics)


@functools.cache
def on_one_device(model: ModelConfig) -> tuple[Any, Any]:
    """Returns what every mesh is compared with."""
    return three_updates(MeshConfig(), 1, model)


# Adam divides a gradient by its own size, so what rounds otherwise in the first update
# grows in the next two: 1.2e-5 was seen with jax 0.10, 3.2e-5 with 0.12.
AFTER_ADAM = 4 * tiny.FLOAT32
CLUSTERS = dataclasses.replace(DROPOUT, cutoffs=(4, 9), div_val=2, kernel="chunked")


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "model"),
    [
        (MeshConfig(data=8), DROPOUT),
        (MeshConfig(data=2, fsdp=2, model=2), DROPOUT),
        (MeshConfig(data=2, fsdp=2, model=2), CLUSTERS),
    ],
    ids=["data", "cube", "cube, clusters"],
)
def test_eight_devices_make_the_updates_of_one(
    config: MeshConfig, model: ModelConfig
) -> None:
    expected_numbers, expected_metrics = on_one_device(model)
    actual_numbers, metrics = three_updates(config, 8, model)
    assert not metrics["skipped"].any()
    tiny.assert_close(metrics, expected_metrics, AFTER_ADAM)
    tiny.assert_close(actual_numbers, expected_numbers, AFTER_ADAM)


# What is refused.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 6, "batch_chunk": 4}, "batch_size.*batch_chunk"),
        (
            {"segments_per_call": 3, "segments_per_update": 2},
            "segments_per_call.*segments_per_update",
        ),
        ({"segments_per_call": 2, "num_steps": 99}, "num_steps.*segments_per_call"),
        ({"tgt_len": 0}, "train.tgt_len"),
        ({"max_bad_steps": 0}, "train.max_bad_steps"),
        ({"max_loss_factor": 1.0}, "train.max_loss_factor = 1.0 must be above 1"),
        ({"max_loss_factor": -2.0}, "train.max_loss_factor = -2.0 must be above 1"),
        ({"seed": -1}, "train.seed"),
    ],
    ids=str,
)
def test_impossible_training_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config(**fields)
