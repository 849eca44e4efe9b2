"""Gradients cross consecutive segments that are computed together.

Dims: G segments in a call of the model, B streams.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import tiny
from tests.update.test_step import (
    OPTIM,
    PARAMS,
    PLAIN,
    B,
    make_config,
    make_segments,
    make_state,
)
from txl_jax.kernels import xla
from txl_jax.model import block
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import TrainConfig
from txl_jax.update.step import TrainStep, nll_sum, sum_gradients

GradientAndMemory = tuple[
    Any, Memory
]  # the gradient of the summed nll, and the memory at the end
PLAINLY: dict[str, Any] = {"kernel": "xla", "remat_policy": "none", "unroll": 1}


def options(G: int) -> TrainConfig:
    """Returns an update of two calls of G segments, in chunks of the streams."""
    sizes = {"segments_per_update": 2 * G, "segments_per_call": 2 * G}
    return make_config(gradient_segments=G, **sizes)


@functools.cache
def in_sequence(config: ModelConfig, G: int) -> GradientAndMemory:
    """Returns the results of reading 2 G segments one after the other, in float64.

    Within each half, unlike in the paper, gradients pass through the memory.
    """
    model = TransformerXL(dataclasses.replace(config, dtype="float32", **PLAINLY))
    segments, key = make_segments(2 * G), jax.random.key(0)

    def total(params: Any, half: Segment, memory: Any) -> tuple[Any, Memory]:
        nll = jnp.zeros(())
        for s in range(G):
            segment = jax.tree.map(lambda x, s=s: x[s], OneSegment._make(half))
            one, outcome = nll_sum(model, params, memory, segment, key)
            nll, memory = nll + one, outcome.memory
        return nll, memory

    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "float32", jnp.float64)
        patch.setattr(xla, "f32", jnp.float64)
        patch.setattr(ModelConfig, "compute_dtype", np.dtype("float64"))
        patch.setattr(jax.lax, "stop_gradient", lambda x: x)
        patch.setattr(
            block, "project", lambda x, w, M: jnp.einsum("BKD,HAD->BKHA", x, w)
        )
        params = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        grads, memory = jax.tree.map(np.zeros_like, params), Memory.empty(config, B)
        grad = jax.jit(jax.grad(total, has_aux=True))
        for first in (0, G):
            half = jax.tree.map(lambda x, s=first: x[s : s + G], segments)
            found, memory = jax.device_get(grad(params, half, memory))
            grads = jax.tree.map(np.add, grads, found)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype("float64")}
    return grads, memory


def visible(memory: Memory) -> np.ndarray:
    """Returns which slots of a memory are visible, [1, B, M, 1]."""
    M = memory.mem_len
    return (np.arange(M) >= M - memory.filled_B[:, None])[None, ..., None]


@pytest.mark.parametrize(
    ("changes", "G"),
    [
        ({}, 2),
        (tiny.ALL, 3),
        pytest.param(
            *({"kernel": "chunked", "remat_policy": "save:q,k"}, 3),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *({"dtype": "bfloat16", "remat_policy": "full", "unroll": tiny.N}, 2),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_gradients_pass_through_the_memory(changes: dict[str, Any], G: int) -> None:
    """The third segment is a tail; documents start after it."""
    model = TransformerXL(tiny.config(**changes))
    tolerance = tiny.BFLOAT16 if "dtype" in changes else tiny.FLOAT32
    # Rounding moves the gradients of so few tokens by up to 15 %, in one segment too.
    of_gradients = 10 * tolerance if "dtype" in changes else tolerance
    args = PARAMS, Memory.empty(model.config, B), make_segments(2 * G)
    key = jax.random.key(0)
    expected, memory = in_sequence(model.config, G)
    across = functools.partial(sum_gradients, model, config=options(G))
    sums, after = jax.jit(across)(*args, key)
    tiny.assert_close(sums.grads, expected, of_gradients)
    h_NBMD, seen_1BM1 = np.asarray(after.h_NBMD, np.float64), visible(memory)
    tiny.assert_close(h_NBMD * seen_1BM1, memory.h_NBMD * seen_1BM1, tolerance)
    tiny.assert_equal(after.filled_B, memory.filled_B)
    alone = jax.jit(functools.partial(sum_gradients, model, config=make_config()))
    stopped, _ = alone(*args, key)
    tiny.assert_close(sums.nll, stopped.nll, tolerance)
    with pytest.raises(AssertionError):
        tiny.assert_close(sums.grads, stopped.grads, of_gradients)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_an_optimizer_gets_the_gradient_across_segments(name: str) -> None:
    """Its update equals the update for segments read one after the other."""
    rates = dataclasses.replace(OPTIM, optimizer=name, schedule="constant", lr=0.5)
    optimizer, schedule = make_optimizer(rates), make_schedule(rates, 96)
    state, segments = make_state(PLAIN, optimizer), make_segments(4)
    step = TrainStep(TransformerXL(PLAIN), optimizer, schedule, options(2))
    after, metrics = jax.jit(step)(state, segments)
    grads, _ = in_sequence(PLAIN, 2)
    tokens = segments.weights_SBL.sum()
    mean = jax.tree.map(lambda x: jnp.float32(x / tokens), grads)
    norm = optax.tree.norm(mean)
    tiny.assert_close(metrics["grad_norm"][0], norm)
    update = jax.jit(optimizer.update)
    updates, _ = update(mean, state.opt_state, state.params, grad_norm=norm)
    expected = jax.tree.map(lambda p, u: p - 0.5 * u, state.params, updates)
    # LAMB's first update divides each gradient by its size, and Muon's iteration
    # amplifies small singular values, and so their rounding.
    tiny.assert_close(after.params, expected, 10 * tiny.FLOAT32)
