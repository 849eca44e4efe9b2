"""Dynamic evaluation follows its rule, and scores before it learns.

Dims: L segment.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.data.streams import Streams
from txl_jax.evaluate import dynamic
from txl_jax.evaluate.dynamic import EPSILON, root_mean_squares
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

PARAMS = tiny.make_params()
L = 4
CONFIG = EvalConfig(
    streams=1, tgt_len=L, mem_len=5, dynamic="rms", dynamic_lr=0.02, dynamic_decay=0.3
)
STILL: dict[str, Any] = dict(dynamic_lr=0.0, dynamic_decay=0.0, sweep="dynamic_lr=0")
MODEL = tiny.config(dropout=0.5, dropatt=0.5)  # evaluation ignores the dropout
TOKENS = tiny.make_tokens(1, 3 * L + 3)[0]  # the last segment is shorter
MESH = tiny.one_device()


def segments(tokens: np.ndarray = TOKENS) -> Any:
    return Streams(tokens, 1, L).epoch()


def gradients(
    params: Any, tokens: np.ndarray, memory: Memory
) -> tuple[Any, float, Any]:
    """Returns (gradient of the mean, sum, memory) of one unpadded segment."""
    grads, (nll, after) = gradient(params, tokens[None], memory)
    return jax.tree.map(np.asarray, grads), float(nll), after


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def gradient(params: Any, tokens_BL: Any, memory: Memory) -> Any:
    model = TransformerXL(evaluation_model(tiny.CONFIG, CONFIG))
    pair = tokens_BL[:, :-1], tokens_BL[:, 1:]
    nll_BL, after = model.apply({"params": params}, *pair, memory, method="nll")
    return nll_BL.mean(), (nll_BL.sum(), after)


def by_hand(config: EvalConfig, rms: Any) -> list[float]:
    """Returns each segment's nll by the rule in numpy."""
    theta, memory = PARAMS, Memory.empty(evaluation_model(MODEL, CONFIG), 1)
    epsilon = EPSILON if config.dynamic == "rms" else 0.0
    nlls = []
    for at in range(0, len(TOKENS) - 1, L):
        grads, nll, memory = gradients(theta, TOKENS[at : at + L + 1], memory)
        nlls.append(nll)
        theta = jax.tree.map(
            lambda x, x_0, g, r: (
                x
                - config.dynamic_lr * g / (r + epsilon)
                + np.minimum(config.dynamic_decay * r, 1) * (x_0 - x)
            ),
            *(theta, PARAMS, grads, rms),
        )
    return nlls


def statistics(tokens: np.ndarray = TOKENS) -> Any:
    rms = root_mean_squares(MODEL, CONFIG, MESH, PARAMS, segments(tokens))
    return jax.device_get(rms)


def read(config: EvalConfig, rms: Any, tokens: np.ndarray = TOKENS) -> list[float]:
    reader = dynamic.Adaptation(MODEL, config, MESH, rms)
    nlls = reader.read(PARAMS, segments(tokens))
    return [float(nll) for nll in nlls]


def test_statistics_are_the_gradients_of_training() -> None:
    memory, squares = Memory.empty(evaluation_model(MODEL, CONFIG), 1), []
    for at in range(0, len(TOKENS) - 1, L):
        grads, _, memory = gradients(PARAMS, TOKENS[at : at + L + 1], memory)
        squares.append(jax.tree.map(np.square, grads))
    roots = jax.tree.map(lambda *each: np.sqrt(np.mean(each, axis=0)), *squares)
    mean = np.concatenate([x.ravel() for x in jax.tree.leaves(roots)]).mean()
    tiny.assert_close(statistics(), jax.tree.map(lambda x: x / mean, roots))


@pytest.mark.parametrize("kind", ["rms", "sgd"])
def test_parameters_follow_the_rule(kind: str) -> None:
    config = dataclasses.replace(CONFIG, dynamic=kind)
    rms = statistics() if kind == "rms" else None
    expected = by_hand(config, rms or jax.tree.map(np.ones_like, PARAMS))
    np.testing.assert_allclose(read(config, rms), expected, rtol=tiny.FLOAT32)
    still = dataclasses.replace(config, **STILL)
    assert not np.allclose(read(still, rms), expected, rtol=1e-3)


def test_a_token_is_scored_before_it_is_learned_from() -> None:
    changed = TOKENS.copy()
    changed[L + 2] = (changed[L + 2] + 1) % tiny.V  # in the second segment
    rms = statistics()
    before, after = read(CONFIG, rms), read(CONFIG, rms, changed)
    assert before[0] == after[0] and before[1] != after[1] and before[2] != after[2]


def test_rates_share_a_program() -> None:
    rms, other = statistics(), dataclasses.replace(CONFIG, dynamic_lr=0.01)
    first = dynamic.Adaptation(MODEL, CONFIG, MESH, rms)
    for reader, config in ((first, CONFIG), (first.at_rates(other), other)):
        nlls = [float(nll) for nll in reader.read(PARAMS, segments())]
        assert reader.program is first.program and nlls == read(config, rms)
