"""A sliding window scores each token from the W before it, read from nothing.

Dims: B streams, W tokens of a window, T tokens of a text.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests import reference, tiny
from tests.reference import Params
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import EvalConfig, make_evaluate
from txl_jax.evaluate.sliding import make_sliding, windows
from txl_jax.model.config import ModelConfig
from txl_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
W = 6
HOW = EvalConfig(streams=4, sliding_window=W, mem_len=9, tgt_len=5)
TOKENS = tiny.make_tokens(1, 25)[0]


def silent(done: int, total: int) -> None:
    """Shows no progress."""


def slide(config: ModelConfig, params: Params, how: EvalConfig) -> dict[str, Any]:
    return make_sliding(config, how, MESH)(params, TOKENS, silent)


def loop(
    config: ModelConfig, params: Params, how: EvalConfig, tokens: np.ndarray
) -> float:
    """Returns the mean nll of the protocol as it is told, by the numpy oracle.

    For every target the window before it, from nothing, of which the last position
    alone predicts.
    """
    config = dataclasses.replace(config, mem_len=0, clamp_len=how.clamp_len)
    settings = tiny.reference_settings(config)
    nothing = reference.empty(config.n_layer, 1, config.d_model)
    nlls = []
    for target in range(1, len(tokens)):
        begin = max(target - how.sliding_window, 0)
        text_1T = tokens[None, begin : target + 1]
        pair = text_1T[:, :-1], text_1T[:, 1:]
        nll_1T, _ = reference.nll(params, *pair, nothing, **settings)
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
def test_nll_is_that_of_the_protocol(
    changes: dict[str, Any], more: dict[str, Any]
) -> None:
    config = tiny.config(**changes)
    how = dataclasses.replace(HOW, **more)
    params = tiny.make_params(config)
    scores = slide(config, params, how)
    expected = loop(config, params, how, TOKENS)
    assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
    wider = dataclasses.replace(how, sliding_window=W + 1)
    if config.position != "learned":
        other = loop(config, params, wider, TOKENS)
        assert scores["nll"] != pytest.approx(other, rel=1e-3)
    assert (scores["tokens"], scores["windows"]) == (24, 24 - W + 1)
    assert (scores["cold_tokens"], scores["mem_len"], scores["tgt_len"]) == (
        W - 1,
        0,
        1,
    )


def test_every_full_window_but_the_first_comes_once_with_its_target() -> None:
    text = np.arange(12, dtype=np.uint8)
    found = []
    for tokens_BW, target_B, weight_B in windows(text, 4, 3):
        assert tokens_BW.shape == (3, 4) and tokens_BW.dtype == np.int32
        both = np.column_stack([tokens_BW, target_B])
        found += both[weight_B > 0].tolist()
    assert found == [[*range(first, first + 5)] for first in range(1, 8)]
    assert not list(windows(text, 11, 3)) and not list(windows(text, 12, 3))


def test_where_no_layer_reaches_farther_it_is_cached_evaluation() -> None:
    """One layer, every token seeing exactly W keys: the memory has the same ones."""
    config = tiny.config(n_layer=1)
    params = tiny.make_params(config)
    cached = EvalConfig(streams=1, tgt_len=5, mem_len=W, same_length=True)
    nll = make_evaluate(config, cached, MESH)(params, TOKENS, silent)["nll"]
    assert slide(config, params, HOW)["nll"] == pytest.approx(nll, rel=tiny.FLOAT32)


def test_max_tokens_leaves_the_rest_of_the_text_unread() -> None:
    params = tiny.make_params()
    for count, cold in ((3, 3), (15, W)):
        scores = slide(tiny.CONFIG, params, dataclasses.replace(HOW, max_tokens=count))
        expected = loop(tiny.CONFIG, params, HOW, TOKENS[: count + 1])
        assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
        assert (scores["tokens"], scores["windows"]) == (count, count - cold + 1)


def test_documents_are_refused() -> None:
    with pytest.raises(
        UserError, match="eval.reset_memory_at = 3: eval.sliding_window"
    ):
        dataclasses.replace(HOW, reset_memory_at=3)
