"""A sliding window predicts each token from exactly the W tokens before it.

Dims: B streams, W tokens of a window, T tokens of a text.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate
from txl_jax.evaluate.sliding import make_sliding, windows
from txl_jax.model.config import ModelConfig

W = 6
CONFIG = EvalConfig(streams=4, sliding_window=W, mem_len=9, tgt_len=5)
TOKENS = tiny.make_tokens(1, 25)[0]
SCHEMES: dict[str, Any] = {
    "ours": {},
    "pre_lnorm, clamp_len, untie_r": {
        "pre_lnorm": True,
        "untie_r": True,
        "clamp_len": 3,
    },
    "Al-Rfou": {"position": "learned", "n_position": W, "mem_len": 0},
}


@functools.cache
def sliding(model_config: ModelConfig = tiny.CONFIG) -> Evaluate:
    """Returns the evaluation of a model, compiled once for all tests."""
    config = dataclasses.replace(CONFIG, clamp_len=model_config.clamp_len)
    return make_sliding(model_config, config, tiny.one_device())


def loop(model_config: ModelConfig, tokens: np.ndarray, window: int = W) -> float:
    """Returns the mean nll of the published protocol, by the numpy oracle.

    Every target is predicted by the last position of the window before it.
    """
    params = tiny.make_params(model_config)
    model_config = dataclasses.replace(model_config, mem_len=0)
    nlls = [
        tiny.cold_nll(model_config, params, tokens[max(at - window, 0) : at + 1])[-1]
        for at in range(1, len(tokens))
    ]
    return float(np.mean(nlls))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nll_matches_the_protocol(scheme: str) -> None:
    model_config = tiny.config(**SCHEMES[scheme])
    params = tiny.make_params(model_config)
    scores = sliding(model_config)(params, TOKENS, tiny.silent)
    nll = scores["nll"]
    assert nll == pytest.approx(loop(model_config, TOKENS), rel=tiny.FLOAT32)
    if scheme != "Al-Rfou":
        assert nll != pytest.approx(loop(model_config, TOKENS, W + 1), rel=1e-3)
    assert (scores["tokens"], scores["windows"]) == (24, 24 - W + 1)
    lengths = [scores[name] for name in ("cold_tokens", "mem_len", "tgt_len")]
    assert lengths == [W - 1, 0, 1]


def test_every_full_window_but_the_first_comes_once() -> None:
    text = np.arange(12, dtype=np.uint8)
    rows = []
    for tokens_BW, target_B, weight_B in windows(text, 4, 3):
        assert tokens_BW.shape == (3, 4) and tokens_BW.dtype == np.int32
        both = np.column_stack([tokens_BW, target_B])
        rows += both[weight_B > 0].tolist()
    assert rows == [[*range(first, first + 5)] for first in range(1, 8)]
    assert not list(windows(text, 11, 3)) and not list(windows(text, 12, 3))


@pytest.mark.long
def test_with_one_layer_it_matches_cached_evaluation() -> None:
    """Every token sees exactly W keys, and the memory holds the same ones."""
    config = tiny.config(n_layer=1)
    params = tiny.make_params(config)
    cached = EvalConfig(streams=1, tgt_len=5, mem_len=W, same_length=True)
    evaluate = make_evaluate(config, cached, tiny.one_device())
    nll = evaluate(params, TOKENS, tiny.silent)["nll"]
    scores = sliding(config)(params, TOKENS, tiny.silent)
    assert scores["nll"] == pytest.approx(nll, rel=tiny.FLOAT32)


def test_max_tokens_leaves_the_rest_of_the_text_unread() -> None:
    config = dataclasses.replace(CONFIG, max_tokens=3)
    evaluate = make_sliding(tiny.CONFIG, config, tiny.one_device())
    scores = evaluate(tiny.make_params(), TOKENS, tiny.silent)
    expected = loop(tiny.CONFIG, TOKENS[:4])
    assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
    assert (scores["tokens"], scores["windows"]) == (3, 1)


def test_documents_are_refused() -> None:
    message = "eval.reset_memory_at = 3 must be -1 with eval.sliding_window"
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, reset_memory_at=3)
