"""The continuous cache follows its formula across segments (Grave et al. 2017)."""

import dataclasses

import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.evaluate import cache
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.memory import Memory

PARAMS = tiny.make_params()
T, B = 21, 2
CONFIG = EvalConfig(
    streams=B, tgt_len=4, mem_len=T, cache_len=6, cache_weight=0.3, cache_theta=0.2
)
TOKENS = tiny.make_tokens(1, T + 1)[0]
MESH = tiny.one_device()


def evaluate(config: EvalConfig) -> float:
    """Returns the mean nll of the text."""
    own = tiny.CONFIG, config, MESH
    read = cache.make_reader(*own).read if config.cache_len else None
    score = make_evaluate(*own, read)
    return score(PARAMS, TOKENS, lambda *_: None)["nll"]


def by_hand(config: EvalConfig) -> float:
    """Returns it by the formula, one word after the other."""
    model = evaluation_model(tiny.CONFIG, config)
    total = 0.0
    for b in range(B):
        start, end = (n * T // B for n in (b, b + 1))
        text = TOKENS[start : end + 1]
        memory = Memory.empty(model, 1)
        h_1TD, _ = tiny.apply(model, PARAMS, text[None, :-1], memory)
        log_p_1TV, _ = tiny.apply(
            model, PARAMS, text[None, :-1], memory, method="logits"
        )
        h_TD = np.asarray(h_1TD[0], np.float64)
        for t, target in enumerate(text[1:]):
            p = float(np.exp(log_p_1TV[0, t, target]))
            older = range(max(t - config.cache_len, 0), t)
            weights = [np.exp(config.cache_theta * h_TD[t] @ h_TD[i]) for i in older]
            same = [
                w for w, i in zip(weights, older, strict=True) if text[i + 1] == target
            ]
            if weights:
                share = config.cache_weight
                p = (1 - share) * p + share * sum(same) / sum(weights)
            total -= np.log(p)
    return total / T


@pytest.mark.parametrize("tgt_len", [4, 7])
def test_the_nll_is_that_of_the_mixture(tgt_len: int) -> None:
    """The cache passes from segment to segment; the last one is shorter."""
    config = dataclasses.replace(CONFIG, tgt_len=tgt_len)
    assert evaluate(config) == pytest.approx(by_hand(CONFIG), rel=1e-5)


def test_without_a_share_the_nll_is_the_models() -> None:
    sweep = "cache_weight=0"
    none = dataclasses.replace(CONFIG, cache_weight=0.0, sweep=sweep)
    static = EvalConfig(streams=B, tgt_len=4, mem_len=T)
    assert evaluate(none) == pytest.approx(evaluate(static), rel=1e-6)
    assert evaluate(CONFIG) != pytest.approx(evaluate(static), rel=1e-3)


def test_a_cache_that_does_not_fit_is_refused() -> None:
    with refused("a cache of 1,000,000,000 tokens .* lower eval.cache_len"):
        evaluate(dataclasses.replace(CONFIG, cache_len=10**9, tgt_len=500))
