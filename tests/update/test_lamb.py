"""The LAMB optimizer agrees with NVIDIA's, tensor by tensor."""

import flax.traverse_util
import jax
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from tests.update.test_optim import DECAYED, VARIANTS, draw_variants, nested
from txl_jax.update.optim import make_optimizer
from txl_jax.update.options import OptimConfig


def tensors(values: dict[str, Array]) -> dict[str, Array]:
    """Returns a flat tree as the tensors of NVIDIA's code, each flattened."""
    result = {}
    for name, x in values.items():
        if name.startswith("layers/") or name == "u":
            for n in range(3):
                result[f"{name} of layer {n}"] = x[n].ravel()
        elif name == "embedding/bias":
            for i, part in enumerate(np.split(x, [5, 9])):
                result[f"{name} of cluster {i}"] = part
        else:
            result[name] = x.ravel()
    for n in range(3):
        parts = [result.pop(f"layers/attention/{x} of layer {n}") for x in "qkv"]
        result[f"qkv of layer {n}"] = np.concatenate(parts)
    return result


@pytest.mark.parametrize("decay, epsilon", [(0.0, 1e-6), (0.1, 1e-2)])
def test_updates_match_nvidias_lamb(
    decay: float, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps agree, tensor by tensor, for weights of all norms, even zero."""
    monkeypatch.setattr("txl_jax.update.optim.LAMB_EPSILON", epsilon)
    config = OptimConfig(optimizer="lamb", weight_decay=decay, clip=0.0)
    values, lr, steps = draw_variants(0, 0.7), 0.3, 4
    values["embedding/bias"][5:9] = 0
    values["layers/attention/norm/bias"][1] = 0
    values["layers/attention/r"][2] *= 9
    gradients = [draw_variants(k, 0.1**k) for k in range(1, steps + 1)]
    for gradient in gradients:
        gradient["w"][:] = 0  # an update of zero, since it is not decayed
    weights = {name: x.astype(np.float64) for name, x in tensors(values).items()}
    lengths = [np.linalg.norm(x) for x in weights.values()]
    assert min(lengths) == 0 and max(lengths) > 10
    decayed = tensors({n: np.full(s, n in DECAYED) for n, s in VARIANTS.items()})
    first = {name: np.zeros_like(x) for name, x in weights.items()}
    second = {name: np.zeros_like(x) for name, x in weights.items()}

    optimizer, params = make_optimizer(config), nested(values)
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(optimizer.update)
    for gradient in gradients:
        update, state = step(nested(gradient), state, params)
        update = jax.device_get(update)
        params = jax.tree.map(lambda p, u: p - np.float32(lr) * u, params, update)
        for name, grad in tensors(gradient).items():
            p = weights[name]
            first[name] = first[name] * 0.9 + (1 - 0.9) * grad
            second[name] = second[name] * 0.999 + (1 - 0.999) * grad * grad
            adam_step = first[name] / (np.sqrt(second[name]) + epsilon)
            adam_step = adam_step + decay * p * decayed[name]
            weight_norm = min(np.sqrt(np.sum(p * p)), 10)
            adam_norm = np.sqrt(np.sum(adam_step * adam_step))
            trust_ratio = 1.0
            if weight_norm and adam_norm:
                trust_ratio = weight_norm / (adam_norm + epsilon)
            weights[name] = p - lr * trust_ratio * adam_step
        flat = flax.traverse_util.flatten_dict(params, sep="/")
        tiny.assert_close(tensors(flat), weights)
