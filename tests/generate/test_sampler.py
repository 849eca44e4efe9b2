"""Tokens are drawn from the model's distribution, restricted as the config says.

Dims: B streams, L segment, V vocabulary, T tokens of prompt and continuation.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests import reference
from tests.support import tiny
from tests.support.reference_fast import Stream
from txl_jax.generate import sampler
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import choose, restrict

# Random numbers, also rounded to quarters so that tokens tie.
LOGITS_BV = 2 * jax.random.normal(jax.random.key(0), (4, 50))
LOGITS_BV = jnp.concatenate([LOGITS_BV, jnp.round(LOGITS_BV * 4) / 4])


def allowed_V(logits_V: Array, config: GenerateConfig) -> np.ndarray:
    """Returns which tokens may be drawn; ties with the last one are kept."""
    scaled_V = np.asarray(logits_V, np.float64) / config.temperature
    likeliest = np.argsort(-scaled_V)
    if config.top_k:
        last = likeliest[: config.top_k][-1]
        likeliest = likeliest[scaled_V[likeliest] >= scaled_V[last]]
    if config.top_p < 1:
        p = np.exp(scaled_V[likeliest])
        last = likeliest[np.argmax(np.cumsum(p / p.sum()) >= config.top_p)]
        likeliest = likeliest[scaled_V[likeliest] >= scaled_V[last]]
    return np.isin(np.arange(len(scaled_V)), likeliest)


@pytest.mark.parametrize("top_k", [0, 1, 7, 49, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.777, 1.0])
def test_restrict_agrees_with_a_literal_transcription(top_p: float, top_k: int) -> None:
    for temperature in (0.3, 2.0):
        config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        actual_BV = np.asarray(restrict(LOGITS_BV, config))
        kept_BV = np.stack([allowed_V(logits_V, config) for logits_V in LOGITS_BV])
        np.testing.assert_array_equal(np.isfinite(actual_BV), kept_BV)
        scaled_BV = np.asarray(LOGITS_BV)[kept_BV] / temperature
        np.testing.assert_allclose(actual_BV[kept_BV], scaled_BV, rtol=tiny.FLOAT32)


@pytest.mark.parametrize("temperature, top_p", [(0, 0.5), (1e-40, 1), (1, 1e-46)])
def test_tiny_values_are_greedy(temperature: float, top_p: float) -> None:
    config = GenerateConfig(temperature=float(temperature), top_k=3, top_p=float(top_p))
    for seed in range(3):
        tokens_B = choose(LOGITS_BV, jax.random.key(seed), config)
        np.testing.assert_array_equal(tokens_B, LOGITS_BV.argmax(axis=-1))


PARAMS = tiny.make_params()
PROMPT = tiny.make_tokens(1, 9)[0]
PROMPTS = [PROMPT[:2], PROMPT]
MEMORY = GenerateConfig(num_tokens=14, top_k=4, mem_len=4)
WINDOW = dataclasses.replace(MEMORY, mem_len=0)


def oracle_nll(config: Any, text_T: np.ndarray, bounds: list[int]) -> list[float]:
    """Returns the nll of all tokens but the first, by segments with these bounds."""
    settings, nll_T = tiny.reference_settings(config), []
    memory = reference.empty(tiny.N, 1, tiny.D)
    for begin, end in itertools.pairwise(bounds):
        pair = text_T[None, begin:end], text_T[None, begin + 1 : end + 1]
        nll_1L, memory = reference.nll(PARAMS, *pair, memory, **settings)
        nll_T += nll_1L[0].tolist()
    return nll_T


def test_memory_is_carried_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has its own, however many tokens are fetched at once."""
    second = dataclasses.replace(MEMORY, seed=MEMORY.seed + 1)
    alone_T = sampler.sample(tiny.CONFIG, PARAMS, PROMPT, second)
    monkeypatch.setattr(sampler, "EVERY", 5)
    parts = list(sampler.stream(tiny.CONFIG, PARAMS, PROMPTS, MEMORY, window=3))
    assert [part.nll_BT.shape for part in parts] == [(2, 5), (2, 5), (2, 4)]
    tokens_BT, nll_BT = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    np.testing.assert_array_equal(tokens_BT[1], alone_T)
    for prompt, tokens_T, nll_T in zip(PROMPTS, tokens_BT, nll_BT, strict=True):
        text_T, last = np.r_[prompt, tokens_T], len(prompt) - 1
        # The last token of the prompt is read together with the sample's first one.
        bounds = [*range(0, last, 3), *range(last, len(text_T))]
        expected = oracle_nll(tiny.config(mem_len=4), text_T, bounds)
        tiny.assert_close(nll_T, expected[last:])


def test_fast_weights_are_carried_between_tokens() -> None:
    config = tiny.config(mem_len=4, **tiny.FAST)
    params = tiny.make_params(config)
    options = dataclasses.replace(MEMORY, mem_len=4)
    ((tokens_BT, nll_BT),) = sampler.stream(config, params, PROMPTS, options, window=3)
    for prompt, tokens_T, nll_T in zip(PROMPTS, tokens_BT, nll_BT, strict=True):
        oracle = Stream(params, **tiny.reference_settings(config))
        oracle.read_text(prompt, 3)
        tiny.assert_close(nll_T, oracle.read_text(np.r_[prompt[-1], tokens_T], 1))


LEARNED = {"position": "learned", "n_position": 4}


@pytest.mark.parametrize(
    "config, window, model",
    [
        (dataclasses.replace(MEMORY, mem_len=64), 64, {}),
        (WINDOW, 6, {}),
        (WINDOW, 4, LEARNED),
        *(pytest.param(WINDOW, n, {}, marks=pytest.mark.long) for n in (1, 9, 40)),
    ],
)
def test_a_window_is_read_again_for_every_token(
    config: GenerateConfig, window: int, model: dict[str, Any]
) -> None:
    """Windows: longer than the text; filling, then sliding; of all learned positions.

    Tokens beyond the vocabulary are never drawn.
    """
    model_config = tiny.config(mem_len=0, **model)
    params = tiny.make_params(model_config)
    drawn = sampler.stream(model_config, params, PROMPTS, config, 3, window)
    ((tokens_BT, nll_BT),) = drawn
    assert tokens_BT.max() < 3
    for prompt, tokens_T, nll_T in zip(PROMPTS, tokens_BT, nll_BT, strict=True):
        text_T = np.r_[prompt, tokens_T]
        expected = [
            tiny.cold_nll(model_config, params, text_T[max(at - window, 0) : at + 1])
            for at in range(len(prompt), len(text_T))
        ]
        tiny.assert_close(nll_T, [nll_T[-1] for nll_T in expected])


def test_groups_of_prompts_share_programs() -> None:
    """The last group may be smaller, and its prompts shorter or longer."""
    prompts = [tiny.make_tokens(1, 9, seed=n)[0][: 3 + n] for n in range(5)]
    reading = sampler.Reading(window=3)
    several = sampler.Sampler(tiny.CONFIG, PARAMS, MEMORY, 2, 9, reading=reading)
    for first in (0, 2, 4):
        own = prompts[first : first + 2]
        (actual,) = several.stream(own, MEMORY.seed)
        (expected,) = sampler.stream(tiny.CONFIG, PARAMS, own, MEMORY, window=3)
        np.testing.assert_array_equal(actual.tokens_BT, expected.tokens_BT)
        tiny.assert_close(actual.nll_BT, expected.nll_BT)
