"""The continuous cache follows its formula across segments (Grave et al. 2017)."""

import dataclasses

import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from txl_jax.evaluate import continuous_cache
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate

PARAMS = tiny.make_params()
T, B = 21, 2
CONFIG = EvalConfig(
    streams=B, tgt_len=4, mem_len=T, cache_len=6, cache_weight=0.3, cache_theta=0.2
)
TOKENS = tiny.make_tokens(1, T + 1)[0]


def evaluate(config: EvalConfig) -> float:
    own = tiny.CONFIG, config, tiny.one_device()
    score = make_evaluate(*own, continuous_cache.make_reader(*own))
    return score(PARAMS, TOKENS, tiny.silent)["nll"]


def by_hand(share: float) -> float:
    """Returns the nll by the formula, one word after the other."""
    model = evaluation_model(tiny.CONFIG, CONFIG)
    total = 0.0
    for b in range(B):
        start, end = (n * T // B for n in (b, b + 1))
        text_T = TOKENS[start : end + 1]
        memory, following = reference.empty(tiny.N, 1, tiny.D), text_T[1:]
        settings = tiny.reference_settings(model)
        (h_TD,), _ = reference.forward(PARAMS, text_T[None, :-1], memory, **settings)
        nll_T = tiny.cold_nll(model, PARAMS, text_T)
        for t, target in enumerate(following):
            p = np.exp(-nll_T[t])
            older = np.arange(max(t - CONFIG.cache_len, 0), t)
            if len(older):
                weights = np.exp(CONFIG.cache_theta * h_TD[older] @ h_TD[t])
                same = weights[following[older] == target]
                p = (1 - share) * p + share * same.sum() / weights.sum()
            total -= np.log(p)
    return total / T


def test_the_nll_is_of_the_mixture() -> None:
    """The cache passes from segment to segment; the last segment is shorter."""
    static = dataclasses.replace(CONFIG, cache_weight=0.0, sweep="cache_weight=0")
    mixed, expected = by_hand(0.3), by_hand(0.0)
    assert evaluate(CONFIG) == pytest.approx(mixed, rel=1e-5)
    assert evaluate(static) == pytest.approx(expected, rel=1e-5)
    assert mixed != pytest.approx(expected, rel=1e-3)
