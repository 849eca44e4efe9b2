"""Learning rates, optimizers and means of parameters follow their formulas."""

import math
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array, Params
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.update.optim import make_average, make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import Average

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
    floor = {"min_lr_ratio": 0.1} if schedule == "cosine" else {}
    rate = rates(schedule=schedule, warmup_steps=WARMUP, **floor)
    tiny.assert_close(rate[: WARMUP + 1], LR * np.arange(WARMUP + 1) / WARMUP)
    assert rate[0] == 0
    assert rate.argmax() == WARMUP
    # The schedule runs over what is left, so that its end is still the last update.
    middle, end = {"cosine": (0.55, 0.1), "constant": (1.0, 1.0)}[schedule]
    tiny.assert_close(rate[(WARMUP + NUM_STEPS) // 2], LR * middle)
    tiny.assert_close(rate[NUM_STEPS], LR * end)


@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_inverse_sqrt_is_the_pytorch_code_s(warmup: int) -> None:
    """Its rate s is set after update s, and so is that of the update numbered s here.

    Before any update it has all of lr, or with a warm-up nothing.
    """

    def multiplier(s: int) -> float:
        if s == 0 and warmup == 0:
            return 1.0
        return s / warmup**1.5 if s <= warmup else 1 / s**0.5

    rate = rates(schedule="inverse_sqrt", warmup_steps=warmup)
    tiny.assert_close(rate, [LR * multiplier(s) for s in range(NUM_STEPS + 1)])
    assert rate.argmax() == warmup


@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_cosine_through_warmup_is_the_pytorch_code_s(warmup: int) -> None:
    """As above; but before any update that code has all of lr, and we have none."""
    expected = []
    for s in range(NUM_STEPS + 1):
        if s < warmup:
            expected.append(LR * s / warmup)
        else:
            wave = (1 + math.cos(math.pi * s / NUM_STEPS)) / 2
            expected.append(LR * (0.1 + 0.9 * wave))
    fields = {"warmup_steps": warmup, "min_lr_ratio": 0.1}
    rate = rates(schedule="cosine_through_warmup", **fields)
    tiny.assert_close(rate, expected)
    if warmup:
        assert rate[0] == 0
        assert rate[warmup] < LR * (1 - 0.01), "it jumps where the warm-up ends"
    else:
        tiny.assert_equal(rate, rates(schedule="cosine", min_lr_ratio=0.1))


@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_cosine_is_the_tensorflow_code_s(warmup: int) -> None:
    """From the first update on: its step counts from 0, as ours does."""
    expected = []
    for g in range(NUM_STEPS + 1):
        if g < warmup:
            expected.append(LR * g / warmup)
        else:
            part = (g - warmup) / (NUM_STEPS - warmup)
            wave = 0.5 * (1 + math.cos(math.pi * part))
            expected.append(LR * ((1 - 0.004) * wave + 0.004))
    fields = {"warmup_steps": warmup, "min_lr_ratio": 0.004}
    tiny.assert_close(rates(schedule="cosine", **fields), expected)


def updates(config: OptimConfig, params: Any, gradients: list[Any]) -> list[Any]:
    """Returns the optimizer's updates in order."""
    optimizer = make_optimizer(config)
    state, result = optimizer.init(params), []
    step = tiny.jit(optimizer.update)
    for gradient in gradients:
        update, state = step(gradient, state, params, grad_norm=norm(gradient))
        result.append(update)
    return result


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
    config = OptimConfig(clip=clip, betas=(0.8, 0.95), epsilon=0.1)
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
    config = OptimConfig(clip=0.25, betas=(0.0, 0.0), epsilon=1e6)
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


# Every name that a parameter can have, in any variant of the model.
VARIANTS: dict[str, tuple[int, ...]] = {
    "embedding/table_0": (5, 4),
    "embedding/table_1": (4, 2),
    "embedding/table_2": (3, 1),
    "embedding/proj_1": (2, 6),
    "embedding/bias": (12,),
    "embedding/cluster_table": (2, 4),
    "embedding/cluster_bias": (2,),
    "embedding/out_table_0": (5, 4),
    "embedding/out_proj_1": (2, 6),
    "layers/attention/q": (3, 6, 2, 3),
    "layers/attention/k": (3, 6, 2, 3),
    "layers/attention/v": (3, 6, 2, 3),
    "layers/attention/r": (3, 6, 2, 3),
    "layers/attention/o": (3, 2, 3, 6),
    "layers/attention/distances": (3, 5, 2, 3),
    "layers/attention/distance_bias": (3, 5, 2),
    "layers/attention/norm/scale": (3, 6),
    "layers/attention/norm/bias": (3, 6),
    "layers/places": (3, 5, 6),
    "layers/feed_forward/in/kernel": (3, 6, 7),
    "layers/feed_forward/in/bias": (3, 7),
    "layers/feed_forward/out/kernel": (3, 7, 6),
    "layers/feed_forward/norm/scale": (3, 6),
    "u": (3, 2, 3),
    "w": (2, 3),
}
DECAYED = {
    *(name for name in VARIANTS if "table" in name or "proj" in name),
    *(f"layers/attention/{name}" for name in ("q", "k", "v", "r", "o", "distances")),
    *("layers/places", "layers/feed_forward/in/kernel"),
    "layers/feed_forward/out/kernel",
}


def nested(flat: dict[str, Any]) -> Any:
    """Returns {"a/b": x} as {"a": {"b": x}}."""
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def draw_variants(seed: int, scale: float) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.normal(size=shape)).astype(np.float32)
        for name, shape in VARIANTS.items()
    }


def test_weight_decay_knows_every_name() -> None:
    values = draw_variants(0, 1.0)
    zero = jax.tree.map(np.zeros_like, nested(values))
    (update,) = updates(OptimConfig(weight_decay=0.1), nested(values), [zero])
    for name, leaf in flax.traverse_util.flatten_dict(update, sep="/").items():
        tiny.assert_close(leaf, 0.1 * values[name] * (name in DECAYED))


def test_updates_are_sgd() -> None:
    """Weight decay is in the gradient, as PyTorch has it, but after the clip."""
    config = OptimConfig(optimizer="sgd", weight_decay=0.1, clip=0.25)
    gradients = make_gradients(4)
    zero = jax.tree.map(np.zeros_like, PARAMS)
    (decay,) = updates(OptimConfig(weight_decay=0.1), PARAMS, [zero])
    for gradient, actual in zip(
        gradients, updates(config, PARAMS, gradients), strict=True
    ):
        factor = 0.25 / norm(gradient)
        total = jax.tree.map(lambda g, d, f=factor: g * f + d, gradient, decay)
        tiny.assert_close(actual, total)


# The mean of the parameters


def means(count: int, **fields: Any) -> tuple[list[Array], list[Array]]:
    """Returns `count` parameters after updates 1, 2.., and the mean after each."""
    add = make_average(OptimConfig(**fields))
    assert add
    rng = np.random.default_rng(0)
    made = [rng.normal(size=3).astype(np.float32) for _ in range(count + 1)]
    average, result = Average({"x": made[0]}, jnp.int32(0)), []
    for number, params in enumerate(made[1:], start=1):
        average = add(average, {"x": params}, jnp.int32(number))
        result.append(np.asarray(average.params["x"]))
    return made, result


def test_asgd_is_the_mean_since_an_update() -> None:
    made, result = means(9, asgd_from=4)
    tiny.assert_equal(result[:4], made[1:5])
    for number in range(4, 10):
        tiny.assert_close(result[number - 1], np.mean(made[4 : number + 1], axis=0))
    made, result = means(5, asgd_from=1)
    tiny.assert_close(result[-1], np.mean(made[1:], axis=0))


def test_without_an_average_there_is_nothing_to_call() -> None:
    assert make_average(OptimConfig()) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "optim.lr"),
        ({"lr": math.nan}, "optim.lr"),
        ({"betas": (0.9, 1.0)}, "optim.betas"),
        ({"epsilon": 0.0}, "optim.epsilon"),
        ({"schedule": "cosin"}, "optim.schedule.*did you mean 'cosine'"),
        ({"optimizer": "lam"}, "optim.optimizer.*did you mean 'lamb'"),
        ({"asgd_from": -1}, "optim.asgd_from"),
        (
            {"schedule": "constant", "min_lr_ratio": 0.1},
            "optim.min_lr_ratio = 0.1 has no.*schedule = .constant",
        ),
    ],
    ids=str,
)
def test_impossible_values_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimConfig(**fields)
