"""The maps show the model's attention, in total and for each term of the score.

Dims: B = 1 stream, L segment, K keys, R distances, N layers, H heads, A head, D model,
I targets shown.
"""

import functools
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.reference_positions import position_encoding
from tests.support.refusal import refused
from txl_jax.data.streams import Streams
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.reader import Reader
from txl_jax.model import fixed
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.modules import feature_norm
from txl_jax.paper import attention_page
from txl_jax.paper.attention_page import WHOLE

L, SPAN, FIRST = 4, 6, 8  # the first segment's start after a full span
TOKENS = tiny.make_tokens(1, 60)[0]
EVAL = EvalConfig(tgt_len=L, mem_len=SPAN, max_tokens=3 * L)


@functools.cache
def read_segments(config: ModelConfig) -> Any:
    """Returns a third segment's attention, from the model and from the maps.

    For each layer: the sublayer's input and output, the values, the probabilities of
    each term, and their inputs.
    """
    outputs: list[Any] = []

    def watch(config: ModelConfig, params: Any, x_BLD: Any, y_BLD: Any) -> Any:
        result = end_sublayer(config, params, x_BLD, y_BLD)
        if "qkv" in params:
            outputs.append((x_BLD, result))
        return result

    end_sublayer = fixed.end_sublayer

    def read(model: FixedTransformerXL, memory: Any, segment: Any, _: int) -> Any:
        with mock.patch.object(fixed, "end_sublayer", watch):
            attended, after = attention_page.read_attended(model, memory, segment)
        v = [layer.v_HBKA for layer in after.layers]
        layers = [jax.tree.map(lambda x: x[n], attended) for n in range(config.n_layer)]  # noqa: B023
        p = [attention_page.terms(layer) for layer in layers]
        return (outputs[: config.n_layer], v, p, layers), after

    reader = Reader(config, read, 1, L)
    params = reader.lay_out(tiny.make_params(config))
    *_, output = reader.outputs(params, Streams(TOKENS[: 3 * L + 1], 1, L).epoch())
    return jax.tree.map(np.asarray, output)


@pytest.mark.parametrize(
    "changes, terms",
    [
        ({}, "abcd"),
        ({"pre_lnorm": True, "clamp_len": 3, "untie_r": True}, "abcd"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ({"position": "shaw_biased", "n_position": 5}, "abcd"),
                ({"position": "rotary", "d_head": 4, **tiny.MODERN}, "a"),
                ({"position": "alibi"}, "ad"),
            )
        ),
    ],
    ids=str,
)
def test_probabilities_match_the_model(changes: dict[str, Any], terms: str) -> None:
    """They reproduce each layer's output, and the terms multiply to the whole."""
    clamp_len = changes.get("clamp_len", 0)
    config = attention_page.map_model(tiny.config(**changes), SPAN, clamp_len)
    params = tiny.make_params(config)
    outputs, v, p, _ = read_segments(config)
    for n, (h_BLD, expected_BLD) in enumerate(outputs):
        own = jax.tree.map(lambda leaf: leaf[n], params["layers"]["attention"])  # noqa: B023
        o_HBLA = np.einsum("HBLK,HBKA->HBLA", p[n][WHOLE], v[n])
        sum_BLD = h_BLD + np.einsum("HBLA,HAD->BLD", o_HBLA, own["o"])
        if not config.pre_lnorm:
            norm: Any = feature_norm(config)
            sum_BLD = norm.apply({"params": own["norm"]}, sum_BLD)
        tiny.assert_close(sum_BLD, expected_BLD)
        assert set(p[n]) == {WHOLE, *terms}
        product = np.prod([np.float64(p[n][name]) for name in terms], axis=0)
        tiny.assert_close(product / product.sum(axis=-1, keepdims=True), p[n][WHOLE])


def test_terms_match_section_3_3() -> None:
    config = attention_page.map_model(tiny.CONFIG, SPAN, 0)
    params = tiny.make_params(config)
    _, _, p, layers = read_segments(config)
    own, (q, k, *_) = params["layers"]["attention"], layers[1]
    # Layer 1, the last query, head 1; distance d is key K - 1 - d.
    q_A, k_RA = q[0, -1, 1], k[0, ::-1, 1][:SPAN]
    R_RD = np.stack([position_encoding(d, tiny.D, 0) for d in range(SPAN)])
    r_RA = R_RD @ own["r"][1, 1].T
    u_A, w_A = params["u"][1], params["w"][1]
    scores = {"a": k_RA @ q_A, "b": r_RA @ q_A, "c": k_RA @ u_A, "d": r_RA @ w_A}
    for name, score_R in scores.items():
        actual_HLR = attention_page.by_distance(p[1][name][:, 0], SPAN)
        weight_R = np.exp(score_R / tiny.A**0.5)
        tiny.assert_close(actual_HLR[1, -1], weight_R / weight_R.sum())


def test_averages_include_only_targets_that_see_the_span() -> None:
    params = tiny.make_params()
    loaded = tiny.loaded(params, eval=EVAL)
    maps = attention_page.make_maps(loaded, TOKENS)
    assert maps.shown_I.tolist() == list(range(FIRST, FIRST + maps.targets))
    for mean_NHR in (maps.shown_NHIR, *maps.mean_NHR.values()):
        np.testing.assert_allclose(mean_NHR.sum(axis=-1), 1, rtol=1e-5)
    p_NHTR = maps.shown_NHIR.astype(np.float64)
    assert p_NHTR.shape == (tiny.N, tiny.H, 12, SPAN)
    tiny.assert_close(p_NHTR.mean(axis=2), maps.mean_NHR[WHOLE])
    entropy_NH = -(p_NHTR * np.log(p_NHTR)).sum(axis=-1).mean(axis=-1)
    tiny.assert_close(entropy_NH, maps.entropy_NH)
    for place in range(L):
        in_memory = p_NHTR[:, :, place::L, place + 1 :].sum(axis=-1).mean(axis=-1)
        tiny.assert_close(in_memory, maps.memory_NHL[:, :, place])
    summary = attention_page.summarize(maps)
    assert summary["uniform_entropy_nats"] == round(np.log(SPAN), 4)
    assert summary["uniform_mean_distance_tokens"] == 2.5
    distance_NH = (p_NHTR @ np.arange(SPAN)).mean(axis=-1)
    actual_NH = summary["head_mean_distance_tokens"]
    np.testing.assert_allclose(actual_NH, distance_NH, atol=1e-4)


def test_a_short_split_or_span_is_refused() -> None:
    for segments, mem_len, message in (
        (99, SPAN, "need .* tokens, but it has 60"),
        (3, 1, "eval.mem_len = 1: attention maps need at least 2"),
    ):
        eval = EvalConfig(tgt_len=L, mem_len=mem_len, max_tokens=segments * L)
        loaded = tiny.loaded(eval=eval)
        with refused(message):
            attention_page.make_maps(loaded, TOKENS)
