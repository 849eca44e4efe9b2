"""Learning rates, optimizers and means of parameters follow their formulas."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.update.optim import make_average, make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import Average, abstract_params

LR, NUM_STEPS, WARMUP = 4e-3, 110, 10


def cosine(step: int, steps: int) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2


# Rates after the warm-up, divided by lr, after s updates. The PyTorch codes set the
# rate of step s after update s; TensorFlow's step counts from 0, as here.
AFTER: dict[str, Callable[[int, int], float]] = {
    "constant": lambda s, warmup: 1.0,
    "cosine": lambda s, warmup: cosine(s - warmup, NUM_STEPS - warmup),
    "cosine_through_warmup": lambda s, warmup: cosine(s, NUM_STEPS),
    "inverse_sqrt": lambda s, warmup: max(s, 1) ** -0.5,
}


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("schedule", AFTER)
def test_schedules_match_the_published_codes(schedule: str, warmup: int) -> None:
    peak = LR * warmup**-0.5 if warmup and schedule == "inverse_sqrt" else LR
    expected = [
        peak * s / warmup if s < warmup else LR * AFTER[schedule](s, warmup)
        for s in range(NUM_STEPS + 1)
    ]
    floor = 0.1 if schedule.startswith("cosine") else 0.0
    fields: dict[str, Any] = {"warmup_steps": warmup, "min_lr_ratio": floor}
    rate = make_schedule(OptimConfig(lr=LR, schedule=schedule, **fields), NUM_STEPS)
    tiny.assert_close(jax.vmap(rate)(jnp.arange(NUM_STEPS + 1)), expected)


def updates(
    config: OptimConfig, params: Any, gradients: list[Any], dtype: str = "float32"
) -> list[Any]:
    optimizer = make_optimizer(config, dtype)
    state, result = jax.jit(optimizer.init)(params), []
    step = jax.jit(optimizer.update)
    for gradient in gradients:
        update, state = step(gradient, state, params, grad_norm=norm(gradient))
        result.append(jax.device_get(update))
    return result


def norm(tree: Any) -> float:
    return math.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)))


def make_gradients(count: int) -> list[Any]:
    """Returns gradients of PARAMS, each greater than the one before."""
    return [jax.tree.map(lambda x, k=k: x * k**2, draw(k)) for k in range(1, count + 1)]


def draw(seed: int, shapes: Any = (("kernel", (3, 4)), ("bias", (4,)))) -> Any:
    draw = np.random.default_rng(seed).normal
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes}


PARAMS = draw(0)


@pytest.mark.parametrize("clip", [0.0, 0.25, 30.0])
def test_updates_are_adam_of_clipped_gradients(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon is as large as the gradients; otherwise Adam hides their lengths."""
    monkeypatch.setattr("txl_jax.update.optim.EPSILON", 0.1)
    config = OptimConfig(clip=clip)
    gradients = make_gradients(5)
    norms = [norm(gradient) for gradient in gradients]
    # One clip does nothing, one always acts and one sometimes.
    assert 0.25 < norms[0] < 30 < norms[-1]
    first = second = jax.tree.map(np.zeros_like, PARAMS)
    for k, actual in enumerate(updates(config, PARAMS, gradients), start=1):
        factor = min(1.0, clip / norms[k - 1]) if clip else 1.0
        gradient = jax.tree.map(lambda x, f=factor: x * f, gradients[k - 1])
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)
        bias1, bias2 = 1 - 0.9**k, 1 - 0.999**k
        mean = jax.tree.map(lambda m, c=bias1: m / c, first)
        root = jax.tree.map(lambda v, c=bias2: np.sqrt(v / c) + 0.1, second)
        tiny.assert_close(actual, jax.tree.map(np.divide, mean, root))


def shapes(**changes: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a model with three clusters, by name."""
    clusters: dict[str, Any] = {"cutoffs": (5, 9), "div_val": 2, "tie_weights": False}
    params = nn.unbox(abstract_params(tiny.config(n_layer=3, **clusters, **changes)))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {name: leaf.shape for name, leaf in flat.items()}


# Every name that a parameter can have, and a new one; u is per layer, w is not.
VARIANTS = {
    **shapes(feed_forward="swiglu", qk_norm=True, **tiny.GATED),
    **shapes(),
    **shapes(position="shaw_biased", n_position=5),
    **shapes(position="learned", n_position=5, mem_len=0),
    "layers/attention/new_scale": (3, 4),
}
MATRICES = {
    *(f"layers/attention/{name}" for name in "qkvro"),
    *(f"layers/feed_forward/{name}/kernel" for name in ("in", "gate", "out")),
    *(name for name in VARIANTS if "/gru/" in name and name.endswith("kernel")),
}
DECAYED = {
    *(name for name in VARIANTS if "table" in name or "proj" in name),
    *MATRICES,
    *("layers/places", "layers/attention/distances"),
}


def nested(flat: dict[str, Any]) -> Any:
    """Returns {"a/b": x} as {"a": {"b": x}}."""
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def draw_variants(seed: int, scale: float) -> dict[str, Array]:
    values = draw(seed, VARIANTS.items())
    return {name: np.float32(scale) * x for name, x in values.items()}


def test_weight_decay_applies_only_to_matrices() -> None:
    values, gradient = draw_variants(0, 1.0), nested(draw_variants(1, 1.0))
    params = nested(values)
    (decayed,) = updates(OptimConfig(weight_decay=0.1), params, [gradient])
    (plain,) = updates(OptimConfig(), params, [gradient])
    decay = nested({name: 0.1 * x * (name in DECAYED) for name, x in values.items()})
    tiny.assert_close(decayed, jax.tree.map(np.add, plain, decay))


def test_muon_is_that_of_optax() -> None:
    """Each layer's matrix has its own step; other parameters have Adam's update."""
    params = nested(draw_variants(0, 1.0))
    gradients = [nested(draw_variants(seed, 1.0)) for seed in (1, 2, 3)]
    expected = optax.contrib.muon(
        -1.0,
        eps=1e-8,
        adam_b1=0.9,
        adam_b2=0.999,
        muon_weight_dimension_numbers=matrix_axes(params),
        consistent_rms=0.2,
    )
    state: Any = jax.jit(expected.init)(params)
    config = OptimConfig(optimizer="muon", clip=0.0)
    short = updates(config, params, gradients, dtype="bfloat16")
    for made, made_short, gradient in zip(
        updates(config, params, gradients), short, gradients, strict=True
    ):
        update, state = jax.jit(expected.update)(gradient, state, params)
        tiny.assert_close(made, update, 100 * tiny.FLOAT32)
        difference = norm(jax.tree.map(np.subtract, made_short, update))
        assert 0 < difference < 0.05 * norm(update)


def matrix_axes(params: Any) -> Any:
    """Returns optax's dimension numbers of MATRICES, and None for the rest."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    axes = {
        name: optax.contrib.MuonDimensionNumbers(
            tuple(range(1, x.ndim - 1)), (x.ndim - 1,)
        )
        if name in MATRICES
        else None
        for name, x in flat.items()
    }
    return nested(axes)


def test_updates_are_sgd() -> None:
    """Weight decay is added to the gradient, as in PyTorch, but after the clip."""
    config = OptimConfig(optimizer="sgd", weight_decay=0.1, clip=0.25)
    gradients = make_gradients(3)
    made = updates(config, PARAMS, gradients)
    for gradient, actual in zip(gradients, made, strict=True):
        factor = 0.25 / norm(gradient)
        tiny.assert_close(actual["bias"], factor * gradient["bias"])
        total = factor * gradient["kernel"] + 0.1 * PARAMS["kernel"]
        tiny.assert_close(actual["kernel"], total)


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


def test_asgd_averages_since_the_stated_update() -> None:
    made, result = means(9, asgd_from=4)
    tiny.assert_equal(result[:4], made[1:5])
    for number in range(4, 10):
        tiny.assert_close(result[number - 1], np.mean(made[4 : number + 1], axis=0))
    made, result = means(5, asgd_from=1)
    tiny.assert_close(result[-1], np.mean(made[1:], axis=0))
