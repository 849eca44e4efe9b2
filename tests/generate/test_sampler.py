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
from txl_jax.errors import UserError
from txl_jax.generate import sampler
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import Drawn, choose, restrict
from txl_jax.model.config import ModelConfig

# As drawn, and rounded to quarters so that tokens tie.
LOGITS_BV = 2 * jax.random.normal(jax.random.key(0), (4, 50))
TIED_BV = jnp.round(LOGITS_BV * 4) / 4


def allowed_V(logits_V: Array, config: GenerateConfig) -> np.ndarray:
    """Returns which tokens may be drawn: one after the other, from the likeliest on.

    Tokens tied with the last one that is kept are kept, so that which of them comes
    first decides nothing.
    """
    scaled = [float(logit) / config.temperature for logit in logits_V]
    likeliest = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if config.top_k:
        last = scaled[likeliest[min(config.top_k, len(scaled)) - 1]]
        likeliest = [token for token in likeliest if scaled[token] >= last]
    mass = sum(np.exp(scaled[token]) for token in likeliest)
    reached = 0.0
    for number, token in enumerate(likeliest):
        reached += np.exp(scaled[token]) / mass
        if config.top_p < 1 and reached >= config.top_p:
            last = scaled[token]
            tied = [other for other in likeliest if scaled[other] == last]
            likeliest = sorted({*likeliest[: number + 1], *tied})
            break
    return np.isin(np.arange(len(scaled)), likeliest)


RESTRICTIONS = [
    (top_k, top_p, temperature)
    for top_k in (0, 1, 7, 49, 1000)
    for top_p in (1e-6, 0.3, 0.777, 1.0)
    for temperature in (0.3, 2.0)
]
# A row for each value, the others mixed.
QUICK = [(0, 0.3, 2.0), (1, 1.0, 0.3), (7, 0.777, 2.0), (49, 1e-6, 0.3), (1000, 1, 0.3)]


@pytest.mark.parametrize("logits_BV", [LOGITS_BV, TIED_BV], ids=["drawn", "tied"])
@pytest.mark.parametrize(
    "top_k, top_p, temperature",
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.long) for row in RESTRICTIONS)],
)
def test_restrict_agrees_with_a_literal_transcription(
    logits_BV: Array, temperature: float, top_p: float, top_k: int
) -> None:
    config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    actual_BV = np.asarray(restrict(logits_BV, config))
    expected_BV = np.stack([allowed_V(logits_V, config) for logits_V in logits_BV])
    np.testing.assert_array_equal(np.isfinite(actual_BV), expected_BV)
    np.testing.assert_allclose(
        actual_BV[expected_BV], logits_BV[expected_BV] / temperature, rtol=tiny.FLOAT32
    )


def test_temperature_zero_takes_the_likeliest() -> None:
    config = GenerateConfig(temperature=0.0, top_k=3, top_p=0.5)
    for seed in range(3):
        tokens_B = choose(LOGITS_BV, jax.random.key(seed), config)
        np.testing.assert_array_equal(tokens_B, LOGITS_BV.argmax(axis=-1))


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig(top_k=4, temperature=1.5),
        GenerateConfig(top_k=0, top_p=0.8, temperature=0.7),
    ],
)
def test_draws_follow_the_restricted_distribution(config: GenerateConfig) -> None:
    draws = 20_000
    logits_V = LOGITS_BV[0, :12]
    allowed = allowed_V(logits_V, config)
    p_V = np.where(allowed, np.exp(logits_V / config.temperature), 0)
    expected = (draws * p_V / p_V.sum())[allowed]
    logits_BV = jnp.broadcast_to(logits_V, (draws, 12))
    tokens_B = np.asarray(choose(logits_BV, jax.random.key(0), config))
    counts = np.bincount(tokens_B, minlength=12)
    assert not counts[~allowed].any()
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum()
    freedom = allowed.sum() - 1
    assert freedom >= 1
    # Mean plus four standard deviations: seeds are fixed, so this is no lottery.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


PARAMS = tiny.make_params()
PROMPT = tiny.make_tokens(1, 9)[0]
MEMORY = GenerateConfig(num_tokens=14, top_k=4, mem_len=4)
WINDOW = dataclasses.replace(MEMORY, mem_len=0)


def draw(
    prompts: list[np.ndarray],
    config: GenerateConfig,
    model_config: ModelConfig = tiny.CONFIG,
    params: Any = PARAMS,
    **more: int,
) -> Drawn:
    """Returns what follows each prompt, sampled together."""
    parts = sampler.stream(model_config, params, prompts, config, **more)
    return Drawn(*(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in segments of 3 tokens."""
    monkeypatch.setattr(sampler, "LONGEST", 3)


def test_a_short_memory_is_carried_from_token_to_token(short_segments: None) -> None:
    tokens_BT, nll_BT = draw([PROMPT], MEMORY)
    text_T = np.r_[PROMPT, tokens_BT[0]]
    settings = tiny.reference_settings(tiny.config(mem_len=4))
    memory, expected = reference.empty(tiny.N, 1, tiny.D), []
    # The last token of the prompt is read with the first one of the sample.
    for begin, end in itertools.pairwise([0, 3, 6, *range(8, len(text_T))]):
        pair = text_T[None, begin:end], text_T[None, begin + 1 : end + 1]
        nll_1L, memory = reference.nll(PARAMS, *pair, memory, **settings)
        expected += nll_1L[0].tolist()
    tiny.assert_close(nll_BT[0], expected[len(PROMPT) - 1 :])


LEARNED = {"position": "learned", "n_position": 4}


@pytest.mark.parametrize(
    "config, window, model",
    [
        (dataclasses.replace(MEMORY, mem_len=64), 64, {}),
        (WINDOW, 1, {}),
        (WINDOW, 11, {}),
        (WINDOW, 4, LEARNED),
        *(pytest.param(WINDOW, n, {}, marks=pytest.mark.long) for n in (3, 9, 40)),
    ],
)
def test_a_window_is_read_again_for_every_token(
    config: GenerateConfig, window: int, model: dict[str, Any]
) -> None:
    """A long memory; one token; filling and then sliding; as many as are learned."""
    model_config = tiny.config(mem_len=0, **model)
    params = tiny.make_params(model_config)
    tokens_BT, nll_BT = draw([PROMPT], config, model_config, params, window=window)
    text_T = np.r_[PROMPT, tokens_BT[0]]
    expected = [
        tiny.cold_nll(model_config, params, text_T[max(at - window, 0) : at + 1])[-1]
        for at in range(len(PROMPT), len(text_T))
    ]
    tiny.assert_close(nll_BT[0], expected)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="generate.prompt has no tokens"):
        draw([PROMPT, PROMPT[:0]], MEMORY)


def test_tokens_beyond_the_vocabulary_are_never_drawn() -> None:
    config = GenerateConfig(num_tokens=40, mem_len=4, temperature=3.0, top_k=0)
    tokens_BT, _ = draw([PROMPT], config, vocab_size=4)
    assert set(tokens_BT[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("config", [MEMORY, WINDOW], ids=["memory", "window"])
def test_prompts_of_different_lengths_do_not_meet(
    config: GenerateConfig, short_segments: None
) -> None:
    prompts = [PROMPT[:2], PROMPT]
    alone = [
        draw([prompt], dataclasses.replace(config, seed=1 + b), window=6)
        for b, prompt in enumerate(prompts)
    ]
    together = draw(prompts, config, window=6)
    for b in (0, 1):
        np.testing.assert_array_equal(together.tokens_BT[b], alone[b].tokens_BT[0])
    assert (together.tokens_BT[0] != together.tokens_BT[1]).any()


def test_the_tokens_do_not_depend_on_how_many_are_fetched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole_T = sampler.sample(tiny.CONFIG, PARAMS, PROMPT, MEMORY)
    monkeypatch.setattr(sampler, "EVERY", 5)
    parts = list(sampler.stream(tiny.CONFIG, PARAMS, [PROMPT], MEMORY))
    assert [part.nll_BT.shape for part in parts] == [(1, 5), (1, 5), (1, 4)]
    assert np.concatenate([part.tokens_BT[0] for part in parts]).tolist() == [*whole_T]
