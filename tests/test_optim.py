"""Learning rates, clip, Adam and weight decay are what their formulas say."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from tests.reference import Array, Params
from txl_jax.errors import UserError
from txl_jax.optim import OptimConfig, make_optimizer, make_schedule

LR, NUM_STEPS, WARMUP = 4e-3, 110, 10


def rates(**fields: Any) -> Array:
    """Returns the learning rate of every update, and of the one after the last."""
    schedule = make_schedule(OptimConfig(lr=LR, **fields), NUM_STEPS)
    return np.array([schedule(step) for step in range(NUM_STEPS + 1)])


def test_cosine_falls_from_lr_to_its_floor() -> None:
    rate = rates(schedule="cosine", min_lr_ratio=0.1)
    assert rate[0] == np.float32(LR)
    tiny.assert_close(rate[NUM_STEPS // 2], LR * (1 + 0.1) / 2)
    tiny.assert_close(rate[NUM_STEPS], LR * 0.1)
    assert (np.diff(rate) < 0).all()
    cosine = [(1 + math.cos(math.pi * k / NUM_STEPS)) / 2 for k in range(NUM_STEPS + 1)]
    tiny.assert_close(rate, LR * (0.1 + 0.9 * np.array(cosine)))
    assert rates(schedule="cosine")[NUM_STEPS] == pytest.approx(0, abs=1e-9)


def test_constant_stays() -> None:
    assert (rates(schedule="constant") == LR).all()


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warm_up_rises_from_zero_to_lr(schedule: str) -> None:
    rate = rates(schedule=schedule, warmup_steps=WARMUP, min_lr_ratio=0.1)
    tiny.assert_close(rate[: WARMUP + 1], LR * np.arange(WARMUP + 1) / WARMUP)
    assert rate[0] == 0
    assert rate.argmax() == WARMUP
    # The schedule runs over what is left, so that its end is still the last update.
    middle, end = {"cosine": (0.55, 0.1), "constant": (1.0, 1.0)}[schedule]
    tiny.assert_close(rate[(WARMUP + NUM_STEPS) // 2], LR * middle)
    tiny.assert_close(rate[NUM_STEPS], LR * end)


def updates(config: OptimConfig, params: Any, gradients: list[Any]) -> list[Any]:
    """Returns the optimiser's updates, one after the other."""
    optimizer = make_optimizer(config)
    state, found = optimizer.init(params), []
    step = tiny.jit(optimizer.update)
    for gradient in gradients:
        update, state = step(gradient, state, params)
        found.append(update)
    return found


def norm(tree: Any) -> float:
    """Returns the length of all leaves together."""
    return math.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)))


def make_gradients(count: int) -> list[Params]:
    """Returns gradients of PARAMS, each greater than the one before."""
    return [
        jax.tree.map(lambda x, k=k: x * k**2, tiny.make_params(seed=k))
        for k in range(1, count + 1)
    ]


PARAMS = tiny.make_params()


@pytest.mark.parametrize("clip", [0.0, 0.25, 100.0])
def test_updates_are_adam_of_clipped_gradients(clip: float) -> None:
    """Epsilon is of the gradients' order: or else Adam hides how long they are."""
    config = OptimConfig(clip=clip, beta1=0.8, beta2=0.95, epsilon=0.1)
    gradients = make_gradients(5)
    norms = [norm(gradient) for gradient in gradients]
    # Of the clips one does nothing, one acts always and one sometimes.
    assert 0.25 < norms[0] < 100 < norms[-1]
    first = second = jax.tree.map(np.zeros_like, PARAMS)
    for k, actual in enumerate(updates(config, PARAMS, gradients), start=1):
        factor = min(1.0, clip / norms[k - 1]) if clip else 1.0
        gradient = jax.tree.map(lambda x, f=factor: x * f, gradients[k - 1])
        first = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, second, gradient)
        bias1, bias2 = 1 - 0.8**k, 1 - 0.95**k
        expected = jax.tree.map(
            lambda m, v, a=bias1, b=bias2: (m / a) / (np.sqrt(v / b) + 0.1),
            first,
            second,
        )
        tiny.assert_close(actual, expected)


def test_clip_is_by_the_norm_of_all_gradients_together() -> None:
    """So the clipped gradient keeps its direction."""
    config = OptimConfig(clip=0.25, beta1=0.0, beta2=0.0, epsilon=1e6)
    gradient = make_gradients(1)[0]
    (update,) = updates(config, PARAMS, [gradient])
    # With this epsilon an update is the clipped gradient, a million times smaller.
    scaled = jax.tree.map(lambda x: np.asarray(x) * 1e6, update)
    tiny.assert_close(norm(scaled), 0.25)
    factor = 0.25 / norm(gradient)
    tiny.assert_close(scaled, jax.tree.map(lambda x: x * factor, gradient))


def test_weight_decay_is_decoupled_and_of_matrices_alone() -> None:
    config = OptimConfig(weight_decay=0.1)
    zero = jax.tree.map(np.zeros_like, PARAMS)
    (update,) = updates(config, PARAMS, [zero])
    decayed = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(update):
        if np.asarray(leaf).any():
            decayed.add(jax.tree_util.keystr(path, simple=True, separator="."))
    attention, feed_forward = "layers.attention", "layers.feed_forward"
    assert decayed == {
        "embedding.table",
        *(f"{attention}.{name}" for name in "qkvro"),
        f"{feed_forward}.in.kernel",
        f"{feed_forward}.out.kernel",
    }
    for name in "qkvro":
        actual, value = (x["layers"]["attention"][name] for x in (update, PARAMS))
        tiny.assert_close(actual, 0.1 * value)
    # It is added to Adam's update, not to the gradient.
    gradients = make_gradients(2)
    plain = updates(OptimConfig(), PARAMS, gradients)
    for actual, without in zip(updates(config, PARAMS, gradients), plain, strict=True):
        expected = jax.tree.map(np.add, without, update)
        tiny.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "optim.lr"),
        ({"lr": math.nan}, "optim.lr"),
        ({"beta2": 1.0}, "optim.beta2"),
        ({"epsilon": 0.0}, "optim.epsilon"),
        ({"schedule": "cosin"}, "optim.schedule.*did you mean 'cosine'"),
    ],
    ids=str,
)
def test_impossible_values_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimConfig(**fields)
