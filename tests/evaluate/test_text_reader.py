"""The nll of a text equals the oracle's, whatever texts are read beside it.

Dims: B streams, T tokens of a text, D model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.support import tiny
from txl_jax.evaluate import text_reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.text_reader import TextReader, arrange, join
from txl_jax.model.config import ModelConfig

PARAMS = tiny.make_params()
NOTHING_T = np.zeros(0, np.int32)
TOKENS_T = tiny.make_tokens(1, 23)[0]
MEMORY = EvalConfig(streams=1, tgt_len=5, mem_len=9)
WINDOW = EvalConfig(streams=1, tgt_len=3, mem_len=0, ext_len=4)


class Scores(NamedTuple):
    """The results for one text."""

    nll_T: np.ndarray
    hidden_TD: np.ndarray


Score = Callable[..., Scores]  # (tokens_T, prefix_T) -> Scores


def make_score(
    config: ModelConfig, options: EvalConfig, params: Any, **more: Any
) -> Score:
    """Returns a function that reads one text alone."""
    reader = TextReader(config, options, ("nll", "hidden"), **more)

    def score(tokens_T: np.ndarray, prefix_T: np.ndarray = NOTHING_T) -> Scores:
        (results,) = map(join, reader.read(params, [tokens_T], prefix_T))
        return Scores(results["nll"], results["hidden"])

    return score


@pytest.fixture(scope="module", params=[1, 2])
def with_memory(request: pytest.FixtureRequest) -> Score:
    config = dataclasses.replace(MEMORY, segments_per_step=request.param)
    return make_score(tiny.CONFIG, config, PARAMS)


def test_scores_and_hidden_states_match_the_oracle(with_memory: Score) -> None:
    settings = tiny.reference_settings(evaluation_model(tiny.CONFIG, MEMORY))
    memory, nlls, hiddens = reference.empty(tiny.N, 1, tiny.D), [], []
    for at in range(0, 23, 5):
        text_BL, target_BL = (
            TOKENS_T[None, at : at + 5],
            TOKENS_T[None, at + 1 : at + 6],
        )
        known_BL = text_BL[:, : target_BL.shape[1]]
        nlls.append(reference.nll(PARAMS, known_BL, target_BL, memory, **settings)[0])
        hidden, memory = reference.forward(PARAMS, text_BL, memory, **settings)
        hiddens.append(hidden)
    for _ in range(2):  # the memory is empty again
        scored = with_memory(TOKENS_T)
        assert np.isnan(scored.nll_T[0])
        tiny.assert_close(scored.nll_T[1:], np.concatenate(nlls, axis=1)[0])
        tiny.assert_close(scored.hidden_TD, np.concatenate(hiddens, axis=1)[0])


def test_a_model_without_memory_reads_windows() -> None:
    read = make_score(tiny.CONFIG, WINDOW, PARAMS)
    scored, expected = read(TOKENS_T), []
    for at in range(0, 22, 3):
        low = max(at - 4, 0)
        nll_T = tiny.cold_nll(tiny.config(mem_len=0), PARAMS, TOKENS_T[low : at + 4])
        expected += nll_T[at - low :].tolist()
    tiny.assert_close(scored.nll_T[1:], np.array(expected))
    assert scored.hidden_TD.shape == (23, tiny.D)


@pytest.mark.parametrize("skip", [1, 7])
def test_a_prefix_is_read_and_not_scored(with_memory: Score, skip: int) -> None:
    whole = with_memory(TOKENS_T)
    rest = with_memory(TOKENS_T[skip:], TOKENS_T[:skip])
    tiny.assert_close(rest.nll_T, whole.nll_T[skip:])
    tiny.assert_close(rest.hidden_TD, whole.hidden_TD[skip:])


def test_documents_are_independent(with_memory: Score) -> None:
    """The old document predicts a delimiter; the new one sees only the delimiter."""
    at = 10  # a segment starts here, so that both are cut alike
    text_T = np.where(TOKENS_T == (end := tiny.V - 1), 0, TOKENS_T)
    text_T[at] = end
    config = dataclasses.replace(MEMORY, segments_per_step=3)
    read = make_score(tiny.CONFIG, config, PARAMS, reset_memory_at=end)
    nll_T = read(text_T)[0]
    tiny.assert_close(nll_T[1 : at + 1], with_memory(text_T)[0][1 : at + 1])
    tiny.assert_close(nll_T[at + 1 :], with_memory(text_T[at:])[0][1:])


def test_a_document_may_be_empty_or_one_token(with_memory: Score) -> None:
    empty = with_memory(NOTHING_T)
    assert (empty.nll_T.shape, empty.hidden_TD.shape) == ((0,), (0, tiny.D))
    one = with_memory(TOKENS_T[:1])
    assert np.isnan(one.nll_T).tolist() == [True] and one.hidden_TD.shape == (1, tiny.D)


KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "same_length": {"same_length": True},
    "visible zeros": {"initial_memory": "zeros"},
    "fast": tiny.FAST,
    "gated": tiny.KINDS,
    "rotary": {"position": "rotary", "d_head": 4},
    "absolute": {"position": "sinusoidal", "mem_len": 0},
    "windows": {"mem_len": 0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_any_lengths_are_read_as_if_alone(kind: str) -> None:
    config = tiny.config(**{"mem_len": 9, **KINDS[kind]})
    M = config.mem_len
    options = EvalConfig(
        streams=4,
        tgt_len=5,
        segments_per_step=2 if M else 1,
        mem_len=M,
        ext_len=0 if M else 4,
        same_length=config.same_length,
    )
    params, rng = tiny.make_params(config), np.random.default_rng(len(kind))
    reader = TextReader(config, options, ("nll", "hidden"))
    alone = dataclasses.replace(options, segments_per_step=1)
    read_alone = make_score(config, alone, params)
    lengths = [0, 1, 1, 5, 6, 31, *rng.integers(0, 12, 12)]
    rng.shuffle(lengths)
    texts = [tiny.make_tokens(1, T, seed)[0] for seed, T in enumerate(lengths)]
    prefix_T = TOKENS_T[: len(kind) % 2]
    results = [*map(join, reader.read(params, texts, prefix_T))]
    assert len(results) == len(texts)
    for text_T, actual in zip(texts, results, strict=True):
        expected = read_alone(text_T, prefix_T)
        first = 1 - len(prefix_T)
        assert np.isnan(actual["nll"][:first]).all()
        tiny.assert_close(actual["nll"][first:], expected.nll_T[first:])
        tiny.assert_close(actual["hidden"], expected.hidden_TD)


@pytest.mark.parametrize("options, skip", [(MEMORY, 0), (MEMORY, 9), (WINDOW, 1)])
def test_a_long_text_is_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, options: EvalConfig, skip: int
) -> None:
    options = dataclasses.replace(options, streams=2, segments_per_step=1)
    config = tiny.CONFIG if options.mem_len else tiny.config(mem_len=0)
    reader = TextReader(config, options, ("nll", "hidden"))
    texts = [TOKENS_T[:2], TOKENS_T, TOKENS_T[:0], TOKENS_T[:7], TOKENS_T]
    expected = [*map(join, reader.read(PARAMS, texts, TOKENS_T[:skip]))]
    monkeypatch.setattr(text_reader, "BATCH_TOKENS", 20)
    batched = [[*parts] for parts in reader.read(PARAMS, texts, TOKENS_T[:skip])]
    calls = -(-(23 + skip) // options.tgt_len)
    assert [len(parts) for parts in batched][1::3] == [calls, calls]
    for parts, whole in zip(batched, expected, strict=True):
        for name, x in join(parts).items():
            tiny.assert_close(x[skip == 0 :], whole[name][skip == 0 :])
            assert x.dtype == np.float32


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    L=st.integers(1, 9),
    max_streams=st.integers(1, 9),
    share=st.booleans(),
)
def test_streams_hold_every_text_once_with_little_padding(
    sizes: list[int], L: int, max_streams: int, share: bool
) -> None:
    rounds, texts = [*arrange(sizes, L, max_streams, share)], []
    for B, where in rounds:
        assert B <= max_streams and B & (B - 1) == 0
        used = np.zeros((B, sum(sizes) * (L + 1)), bool)
        for n, (b, start) in where.items():
            texts.append(n)
            end = start + sizes[n]
            assert not used[b, start:end].any(), "texts do not overlap"
            used[b, start:end] = True
            cut = sizes[n] > L or not share
            assert start % L == 0 if cut else start // L == max(end - 1, start) // L
        if share:
            P = int(np.flatnonzero(used.any(axis=0)).max(initial=-1)) + 1
            assert B * P <= 2 * sum(sizes) + B * (max(sizes) + L)
    assert sorted(texts) == list(range(len(sizes)))
