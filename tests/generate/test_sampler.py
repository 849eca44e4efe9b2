"""Tokens are drawn from the model's distribution, restricted as the config says.

Dims: B streams, L segment, V vocabulary, T tokens of prompt and continuation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.generate import sampler
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import choose, restrict, sample
from txl_jax.model.memory import Memory

# As drawn, and rounded to quarters so that tokens tie.
LOGITS_BV = 2 * jax.random.normal(jax.random.key(0), (4, 50))
TIED_BV = jnp.round(LOGITS_BV * 4) / 4


def allowed_V(logits_V: Array, config: GenerateConfig) -> np.ndarray:
    """Says which tokens may be drawn: one after the other, from the likeliest on.

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


@pytest.mark.parametrize("logits_BV", [LOGITS_BV, TIED_BV], ids=["drawn", "tied"])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.777, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 49, 1000])
def test_restrict_agrees_with_a_literal_transcription(
    logits_BV: Array, temperature: float, top_p: float, top_k: int
) -> None:
    config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    got_BV = np.asarray(restrict(logits_BV, config))
    expected_BV = np.stack([allowed_V(logits_V, config) for logits_V in logits_BV])
    np.testing.assert_array_equal(np.isfinite(got_BV), expected_BV)
    np.testing.assert_allclose(
        got_BV[expected_BV], logits_BV[expected_BV] / temperature, rtol=tiny.FLOAT32
    )


def test_top_k_and_top_p_of_nothing_keep_everything() -> None:
    config = GenerateConfig(top_k=0, top_p=1.0)
    np.testing.assert_array_equal(restrict(LOGITS_BV, config), LOGITS_BV)


def test_temperature_zero_takes_the_likeliest() -> None:
    config = GenerateConfig(temperature=0.0, top_k=3, top_p=0.5)
    for seed in range(3):
        tokens_B = choose(LOGITS_BV, jax.random.key(seed), config)
        np.testing.assert_array_equal(tokens_B, LOGITS_BV.argmax(axis=-1))


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig(top_k=0),
        GenerateConfig(top_k=4, temperature=1.5),
        GenerateConfig(top_k=0, top_p=0.8, temperature=0.7),
        GenerateConfig(top_k=20, top_p=0.5),
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
GREEDY = GenerateConfig(num_tokens=14, temperature=0.0, mem_len=64)


def draw(prompt: np.ndarray, config: GenerateConfig, **more: Any) -> np.ndarray:
    return sample(tiny.CONFIG, PARAMS, prompt, config, **more)


def test_memory_equals_reading_the_whole_text_again() -> None:
    text_T = np.r_[PROMPT, draw(PROMPT, GREEDY)]
    model_config = tiny.config(mem_len=0)
    memory = Memory.empty(model_config, 1)
    log_probs, _ = tiny.apply(
        model_config, PARAMS, text_T[None], memory, method="logits"
    )
    likeliest_T = np.asarray(log_probs)[0].argmax(axis=-1)
    begin = len(PROMPT)
    np.testing.assert_array_equal(text_T[begin:], likeliest_T[begin - 1 : -1])
    assert len(set(text_T[begin:].tolist())) > 1, "a model that says something"


@pytest.mark.parametrize("longest", [3, 4, 512])
def test_a_short_memory_is_carried_from_token_to_token(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "LONGEST", longest)
    config = dataclasses.replace(GREEDY, mem_len=4)
    model_config = tiny.config(mem_len=4)
    # The whole prompt: upper layers know of more than the memory holds.
    _, memory = tiny.read(model_config, PARAMS, PROMPT[None, :-1], longest)
    token, expected = int(PROMPT[-1]), []
    for _ in range(config.num_tokens):
        log_probs, memory = tiny.apply(
            model_config, PARAMS, np.full((1, 1), token), memory, method="logits"
        )
        token = int(np.argmax(log_probs))
        expected.append(token)
    assert draw(PROMPT, config).tolist() == expected


def test_without_memory_the_last_token_decides_alone() -> None:
    model_config = tiny.config(mem_len=0)
    every_BL = np.arange(tiny.V)[:, None]
    log_probs, _ = tiny.apply(
        model_config,
        PARAMS,
        every_BL,
        Memory.empty(model_config, tiny.V),
        method="logits",
    )
    next_V = np.asarray(log_probs)[:, 0].argmax(axis=-1)
    token, expected = PROMPT[-1], []
    for _ in range(GREEDY.num_tokens):
        token = next_V[token]
        expected.append(token)
    got = draw(PROMPT, dataclasses.replace(GREEDY, mem_len=0))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("ext_len", [2, 8, 10, 40])
def test_without_memory_a_window_is_read_again_for_every_token(ext_len: int) -> None:
    """Sliding from the start, exactly full, filling and then sliding, never full."""
    config = dataclasses.replace(GREEDY, num_tokens=5, mem_len=0, ext_len=ext_len)
    model_config = tiny.config(mem_len=0)
    text = PROMPT.tolist()
    for _ in range(config.num_tokens):
        window_BL = np.array([text[-(ext_len + 1) :]])
        log_probs, _ = tiny.apply(
            model_config,
            PARAMS,
            window_BL,
            Memory.empty(model_config, 1),
            method="logits",
        )
        text.append(int(np.argmax(log_probs[0, -1])))
    assert draw(PROMPT, config).tolist() == text[len(PROMPT) :]
    assert len(set(text[len(PROMPT) :])) > 1, "a model that says something"


def test_a_model_of_places_reads_windows_of_as_many() -> None:
    model_config = tiny.config(mem_len=0, position="learned", n_position=4)
    params = tiny.make_params(model_config)
    config = dataclasses.replace(GREEDY, num_tokens=5, mem_len=0, ext_len=3)
    text_T = np.r_[PROMPT, sample(model_config, params, PROMPT, config)]
    windows_BL = np.stack([text_T[at : at + 4] for at in range(5, len(text_T) - 4)])
    log_probs, _ = tiny.apply(
        model_config,
        params,
        windows_BL,
        Memory.empty(model_config, len(windows_BL)),
        method="logits",
    )
    likeliest_B = np.asarray(log_probs)[:, -1].argmax(axis=-1)
    np.testing.assert_array_equal(text_T[len(PROMPT) :], likeliest_B)


def test_a_window_that_holds_everything_says_what_a_memory_does() -> None:
    config = dataclasses.replace(GREEDY, mem_len=0, ext_len=63)
    np.testing.assert_array_equal(draw(PROMPT, config), draw(PROMPT, GREEDY))


def test_two_kinds_of_context_are_refused() -> None:
    message = "generate.ext_len = 3 with generate.mem_len = 512"
    with pytest.raises(UserError, match=message):
        GenerateConfig(ext_len=3)


@pytest.mark.parametrize("mem_len", [0, 8])
def test_a_prompt_without_tokens_is_refused(mem_len: int) -> None:
    with pytest.raises(UserError, match="generate.prompt has no tokens"):
        draw(PROMPT[:0], dataclasses.replace(GREEDY, mem_len=mem_len))


def test_tokens_beyond_the_vocabulary_are_never_drawn() -> None:
    config = GenerateConfig(num_tokens=40, mem_len=8, temperature=3.0, top_k=0)
    tokens = draw(PROMPT, config, vocab_size=4)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


# Several prompts, and ends.


def collect(prompts: list[np.ndarray], config: GenerateConfig) -> list[list[int]]:
    """Returns what follows each prompt, sampled together."""
    parts = sampler.stream(tiny.CONFIG, PARAMS, prompts, config)
    return np.concatenate([part.tokens_BT for part in parts], axis=1).tolist()


@pytest.mark.parametrize("changes", [{"mem_len": 6}, {"mem_len": 0, "ext_len": 5}])
def test_prompts_of_different_lengths_do_not_meet(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "LONGEST", 4)
    config = dataclasses.replace(GREEDY, **changes)
    prompts = [PROMPT[:1], PROMPT, PROMPT[2:7], PROMPT[1:6]]
    alone = [draw(prompt, config).tolist() for prompt in prompts]
    assert collect(prompts, config) == alone
    assert len(set(map(str, alone))) > 1


@pytest.mark.parametrize("stream_every", [1, 5, 14, 100])
def test_what_is_drawn_does_not_depend_on_how_often_it_is_shown(
    stream_every: int,
) -> None:
    config = GenerateConfig(num_tokens=14, mem_len=8, stream_every=7)
    other = dataclasses.replace(config, stream_every=stream_every)
    drawn = sampler.stream(tiny.CONFIG, PARAMS, [PROMPT], other)
    parts = [part.tokens_BT for part in drawn]
    assert [part.shape[1] for part in parts[:-1]] == [stream_every] * (len(parts) - 1)
    assert np.concatenate(parts, axis=1)[0].tolist() == draw(PROMPT, config).tolist()


def test_a_stop_token_ends_its_stream_and_no_other() -> None:
    config = GenerateConfig(num_tokens=60, mem_len=8, top_k=0, stream_every=4)
    free = collect([PROMPT, PROMPT[:2]], config)
    stop = free[0][3]
    stopping = dataclasses.replace(config, stop_token=stop)
    ends = [tokens.index(stop) if stop in tokens else 60 for tokens in free]
    assert ends[0] <= 3
    for tokens, plain, end in zip(
        collect([PROMPT, PROMPT[:2]], stopping), free, ends, strict=True
    ):
        assert tokens[: end + 1] == plain[: end + 1]
        assert set(tokens[end:]) <= {stop}
        assert len(tokens) < 60 or end > 55
    alone = draw(PROMPT, stopping).tolist()
    assert alone == draw(PROMPT, config).tolist()[: len(alone)] and alone[-1] == stop
