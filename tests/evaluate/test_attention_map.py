"""The maps show the model's attention, and each term of its score.

Dims: B = 1 stream, L segment, K keys, R distances, N layers, H heads, A head, D model,
I targets shown.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.evaluate import attention_map, attention_probe
from txl_jax.evaluate.attention_map import Maps
from txl_jax.evaluate.attention_probe import WHOLE
from txl_jax.evaluate.options import AttentionConfig
from txl_jax.evaluate.reader import Reader
from txl_jax.model.config import ModelConfig
from txl_jax.model.decoder import DecoderAttention
from txl_jax.model.initializers import layer_norm
from txl_jax.model.memory import oldest_BL, reach
from txl_jax.model.positions import sinusoid_RD
from txl_jax.model.txl import TransformerXL

L, SPAN = 4, 6
TOKENS = tiny.make_tokens(1, 60)[0]
CONFIG = AttentionConfig(segments=3, span=SPAN, shown=100)


@pytest.fixture(scope="module")
def maps() -> Maps:
    params = tiny.make_params()
    return attention_map.make_maps(tiny.CONFIG, params, TOKENS, CONFIG, L, clamp_len=0)


@functools.cache
def read_segments(config: ModelConfig) -> Any:
    """Returns the model's attention sublayers, and the probe's, of a third segment."""
    params = tiny.make_params(config)
    outputs: list[Any] = []

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if isinstance(context.module, DecoderAttention):
            outputs.append((args[0], result[0]))
        return result

    def read(model: TransformerXL, memory: Any, segment: Any) -> Any:
        outputs.clear()
        with nn.intercept_methods(watch):
            after, attended = attention_probe.observe(model, memory, segment)
        oldest = oldest_BL(memory.filled_B, None, SPAN, L, reach(config, SPAN))
        v = [layer.v_HBKA for layer in after.layers]
        return after, (outputs[:], v, attended, oldest)

    reader = Reader(config, read, 1, L)
    segments = attention_map.cut(TOKENS, 2 * L, 3 * L, 2 * L, L)
    *_, output = reader.outputs(reader.unstack(params), segments)
    outputs, v, attended, oldest = jax.tree.map(lambda x: x[0], output)
    layers = [jax.tree.map(lambda x: x[n], attended) for n in range(config.n_layer)]  # noqa: B023
    p = [attention_probe.terms(layer, oldest) for layer in layers]
    return outputs, p, v, layers


@pytest.mark.parametrize(
    "changes, terms",
    [
        ({}, "abcd"),
        ({"pre_lnorm": True, "clamp_len": 3, "untie_r": True}, "abcd"),
        ({"position": "shaw_biased", "n_position": 5}, "abcd"),
        pytest.param(
            {"position": "shaw", "n_position": 12}, "ab", marks=pytest.mark.long
        ),
        pytest.param({"position": "none"}, "a", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_probabilities_are_those_of_the_model(
    changes: dict[str, Any], terms: str
) -> None:
    """They give its layer's output; and the terms multiply to the whole."""
    clamp_len = changes.get("clamp_len", 0)
    config = attention_map.map_model(tiny.config(**changes), SPAN, clamp_len)
    params = tiny.make_params(config)
    outputs, p, v, _ = read_segments(config)
    for n, (h_BLD, expected_BLD) in enumerate(outputs):
        own = jax.tree.map(lambda leaf: leaf[n], params["layers"]["attention"])  # noqa: B023
        o_HBLA = np.einsum("HBLK,HBKA->HBLA", p[n][WHOLE], v[n])
        sum_BLD = h_BLD + np.einsum("HBLA,HAD->BLD", o_HBLA, own["o"])
        if not config.pre_lnorm:
            norm: Any = layer_norm(config)
            sum_BLD = norm.apply({"params": own["norm"]}, sum_BLD)
        tiny.assert_close(sum_BLD, expected_BLD)
        assert set(p[n]) == {WHOLE, *terms}
        product = np.prod([np.float64(p[n][name]) for name in terms], axis=0)
        tiny.assert_close(product / product.sum(axis=-1, keepdims=True), p[n][WHOLE])


def test_terms_are_those_of_section_3_3() -> None:
    config = attention_map.map_model(tiny.CONFIG, SPAN, 0)
    params = tiny.make_params(config)
    _, p, _, layers = read_segments(config)
    own, (q, k, _) = params["layers"]["attention"], layers[1]
    # Of layer 1, the last query, head 1; distance d is key K - 1 - d.
    q_A, k_RA = q[0, -1, 1], k[0, ::-1, 1][:SPAN]
    R_RD = sinusoid_RD(jnp.arange(SPAN), tiny.D)
    r_RA = R_RD @ own["r"][1, 1].T
    u_A, w_A = params["u"][1], params["w"][1]
    scores = {"a": k_RA @ q_A, "b": r_RA @ q_A, "c": k_RA @ u_A, "d": r_RA @ w_A}
    for name, score_R in scores.items():
        got_HLR = attention_probe.by_distance(p[1][name][:, 0], SPAN)
        tiny.assert_close(got_HLR[1, -1], jax.nn.softmax(score_R / tiny.A**0.5))


def test_each_target_sees_the_span_and_nothing_else(maps: Maps) -> None:
    assert maps.shown_NHIR.shape == (tiny.N, tiny.H, 12, SPAN)
    for mean_NHR in (maps.shown_NHIR, *maps.mean_NHR.values()):
        np.testing.assert_allclose(mean_NHR.sum(axis=-1), 1, rtol=1e-5)
    assert (maps.first, maps.targets, maps.tgt_len) == (SPAN, 12, L)
    assert maps.shown_I.tolist() == list(range(SPAN, SPAN + 12))


@pytest.mark.long
def test_shown_targets_are_evenly_spread(maps: Maps) -> None:
    config = dataclasses.replace(CONFIG, shown=5)
    few = attention_map.make_maps(tiny.CONFIG, tiny.make_params(), TOKENS, config, L, 0)
    assert few.shown_I.tolist() == [6, 9, 12, 14, 17]
    tiny.assert_close(few.shown_NHIR, maps.shown_NHIR[:, :, [0, 3, 6, 8, 11]])


def test_averages_are_those_of_the_targets(maps: Maps) -> None:
    p_NHTR = maps.shown_NHIR.astype(np.float64)
    tiny.assert_close(p_NHTR.mean(axis=2), maps.mean_NHR[WHOLE])
    entropy_NH = -(p_NHTR * np.log(p_NHTR)).sum(axis=-1).mean(axis=-1)
    tiny.assert_close(entropy_NH, maps.entropy_NH[WHOLE])
    distance_NH = (p_NHTR @ np.arange(SPAN)).mean(axis=-1)
    tiny.assert_close(distance_NH, maps.distance_NH[WHOLE])
    for place in range(L):
        in_memory = p_NHTR[:, :, place::L, place + 1 :].sum(axis=-1).mean(axis=-1)
        tiny.assert_close(in_memory, maps.memory_NHL[:, :, place])


def test_the_summary_has_the_numbers_of_uniform_attention(maps: Maps) -> None:
    summary = attention_map.summarize(maps)
    assert summary["uniform_entropy_nats"] == round(np.log(SPAN), 4)
    assert summary["uniform_mean_distance_tokens"] == 2.5
    assert np.shape(summary["head_entropy_nats"]) == (tiny.N, tiny.H)
    assert np.shape(summary["memory_mass_by_position"]) == (tiny.N, L)
    assert list(summary["terms"]) == [WHOLE, *"abcd"]
    greatest = np.max(summary["terms"][WHOLE]["entropy_nats"])
    assert 0 < greatest < summary["uniform_entropy_nats"]


def test_similarity_is_the_mean_cosine(maps: Maps) -> None:
    frequency = 10_000.0 ** (-np.arange(0, tiny.D, 2) / tiny.D)
    expected = np.cos(np.arange(SPAN)[:, None] * frequency).mean(axis=1)
    tiny.assert_close(maps.similarity_R, expected)
    assert maps.similarity_NR.shape == (tiny.N, SPAN)
    np.testing.assert_allclose(maps.similarity_NR[:, 0], 1, rtol=1e-5)
    r_HRA = np.array([[[1.0, 0], [0, 2], [3, 0]], [[1, 0], [1, 0], [-1, 0]]])
    cosine_R = attention_map.similarity(r_HRA)
    np.testing.assert_allclose(
        cosine_R, [1, (0 + 0 + 1 - 1) / 4, (1 - 1) / 2], atol=1e-6
    )


def test_models_and_splits_without_maps_are_refused() -> None:
    with pytest.raises(UserError, match="need 61 tokens, but it has 60"):
        config = dataclasses.replace(CONFIG, at=48)
        attention_map.make_maps(tiny.CONFIG, {}, TOKENS, config, L, clamp_len=0)
    with pytest.raises(UserError, match="has no distances"):
        learned = tiny.config(position="learned", n_position=9, mem_len=0)
        attention_map.make_maps(learned, {}, TOKENS, CONFIG, L, clamp_len=0)
    with pytest.raises(UserError, match="attention.at = 3 must be at least"):
        dataclasses.replace(CONFIG, at=3)
