"""A sliding window predicts each token from exactly the W tokens before it.

Dims: B streams, W tokens of a window, T tokens of a text.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests import reference
from tests.reference import Params
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.evaluate.sliding import make_sliding, windows
from txl_jax.model.config import ModelConfig
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
W = 6
CONFIG = EvalConfig(streams=4, sliding_window=W, mem_len=9, tgt_len=5)
TOKENS = tiny.make_tokens(1, 25)[0]


def silent(done: int, total: int) -> None:
    """Shows no progress."""


def slide(
    model_config: ModelConfig, params: Params, config: EvalConfig
) -> dict[str, Any]:
    return make_sliding(model_config, config, MESH)(params, TOKENS, silent)


def loop(
    model_config: ModelConfig, params: Params, config: EvalConfig, tokens: np.ndarray
) -> float:
    """Returns the mean nll of the published protocol, by the numpy oracle.

    Every target is predicted by the last position of the window before it.
    """
    model_config = dataclasses.replace(
        model_config, mem_len=0, clamp_len=config.clamp_len
    )
    settings = tiny.reference_settings(model_config)
    empty = reference.empty(model_config.n_layer, 1, model_config.d_model)
    nlls = []
    for target in range(1, len(tokens)):
        begin = max(target - config.sliding_window, 0)
        text_1T = tokens[None, begin : target + 1]
        pair = text_1T[:, :-1], text_1T[:, 1:]
        nll_1T, _ = reference.nll(params, *pair, empty, **settings)
        nlls.append(nll_1T[0, -1])
    return float(np.mean(nlls))


@pytest.mark.parametrize(
    "changes, more",
    [
        ({}, {}),
        ({"pre_lnorm": True, "untie_r": True}, {"clamp_len": 3}),
        ({"position": "learned", "n_position": W, "mem_len": 0}, {"mem_len": 0}),
    ],
    ids=["ours", "pre_lnorm, clamp_len, untie_r", "Al-Rfou"],
)
def test_nll_matches_the_protocol(
    changes: dict[str, Any], more: dict[str, Any]
) -> None:
    model_config = tiny.config(**changes)
    config = dataclasses.replace(CONFIG, **more)
    params = tiny.make_params(model_config)
    scores = slide(model_config, params, config)
    expected = loop(model_config, params, config, TOKENS)
    assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
    wider = dataclasses.replace(config, sliding_window=W + 1)
    if model_config.position != "learned":
        other = loop(model_config, params, wider, TOKENS)
        assert scores["nll"] != pytest.approx(other, rel=1e-3)
    assert (scores["tokens"], scores["windows"]) == (24, 24 - W + 1)
    assert (scores["cold_tokens"], scores["mem_len"], scores["tgt_len"]) == (
        W - 1,
        0,
        1,
    )


def test_every_full_window_but_the_first_comes_once() -> None:
    text = np.arange(12, dtype=np.uint8)
    rows = []
    for tokens_BW, target_B, weight_B in windows(text, 4, 3):
        assert tokens_BW.shape == (3, 4) and tokens_BW.dtype == np.int32
        both = np.column_stack([tokens_BW, target_B])
        rows += both[weight_B > 0].tolist()
    assert rows == [[*range(first, first + 5)] for first in range(1, 8)]
    assert not list(windows(text, 11, 3)) and not list(windows(text, 12, 3))


def test_with_one_layer_it_matches_cached_evaluation() -> None:
    """Every token sees exactly W keys, and the memory holds the same ones."""
    config = tiny.config(n_layer=1)
    params = tiny.make_params(config)
    cached = EvalConfig(streams=1, tgt_len=5, mem_len=W, same_length=True)
    nll = make_evaluate(config, cached, MESH)(params, TOKENS, silent)["nll"]
    assert slide(config, params, CONFIG)["nll"] == pytest.approx(nll, rel=tiny.FLOAT32)


def test_max_tokens_leaves_the_rest_of_the_text_unread() -> None:
    params = tiny.make_params()
    for count, cold in ((3, 3), (15, W)):
        config = dataclasses.replace(CONFIG, max_tokens=count)
        scores = slide(tiny.CONFIG, params, config)
        expected = loop(tiny.CONFIG, params, CONFIG, TOKENS[: count + 1])
        assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
        assert (scores["tokens"], scores["windows"]) == (count, count - cold + 1)


def test_documents_are_refused() -> None:
    with pytest.raises(
        UserError, match="eval.reset_memory_at = 3 must be -1 with eval.sliding_window"
    ):
        dataclasses.replace(CONFIG, reset_memory_at=3)
