"""Scores and hidden states of texts, strings or tokens, by a loaded model.

Dims: T tokens of a text, D model.
"""

from typing import Any

import jax
import numpy as np
import pytest

import txl_jax
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.data.number import NumberVocab
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab
from txl_jax.evaluate.options import EvalConfig
from txl_jax.runtime.programs import Program

EVAL = EvalConfig(streams=2, tgt_len=4, mem_len=6)
LOADED = tiny.loaded(tiny.make_params(), eval=EVAL)
LETTERS = LOADED._replace(vocab=CharVocab("abcdefghijkl"))
BYTES = LOADED._replace(vocab=ByteVocab())
WORDS = LOADED._replace(vocab=WordVocab(["<eos>", "<unk>"]))
NUMBERS = LOADED._replace(vocab=NumberVocab(tiny.V))


def test_strings_and_tokens_have_the_same_scores_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[Any] = ["abcabcabcab", "", "a", "lk"]
    nlls = txl_jax.score(LETTERS, texts)
    assert [nll_T.shape for nll_T in nlls] == [(11,), (0,), (1,), (2,)]
    assert [np.isnan(nll_T).sum() for nll_T in nlls] == [1, 0, 1, 1]
    hidden = txl_jax.hidden_states(LETTERS, texts)
    assert [h_TD.shape for h_TD in hidden] == [(len(x), tiny.D) for x in texts]
    tokens: list[Any] = [[0, 1, 2] * 3 + [0, 1], [], np.zeros(1, np.uint8)]
    tokens += [jax.numpy.array([11, 10])]
    monkeypatch.setattr(Program, "lower", None)  # a second call compiles nothing
    again = txl_jax.score(NUMBERS, reversed(tokens))
    for actual, expected in zip(reversed(again), nlls, strict=True):
        tiny.assert_close(actual[1:], expected[1:])
    assert txl_jax.score(LETTERS, []) == txl_jax.hidden_states(LETTERS, []) == []


def test_parameters_of_another_type_are_read_by_their_own_program() -> None:
    short = jax.tree.map(lambda x: x.astype("bfloat16"), LETTERS.params)
    nlls = [
        txl_jax.score(LETTERS._replace(params=params), ["abcab"])[0]
        for params in (LETTERS.params, short, LETTERS.params)
    ]
    np.testing.assert_array_equal(nlls[0], nlls[2])
    np.testing.assert_allclose(nlls[0], nlls[1], rtol=0.05)
    assert not np.array_equal(nlls[0][1:], nlls[1][1:])


def test_a_prefix_gives_the_first_token_a_context() -> None:
    (whole_T,) = txl_jax.score(LETTERS, ["cab"])
    for prefix in ("c", [2]):
        (rest_T,) = txl_jax.score(LETTERS, ["ab"], prefix)
        tiny.assert_close(rest_T, whole_T[1:])


@pytest.mark.parametrize(
    "loaded, texts, line",
    [
        (LETTERS, "abc", "texts is one text: give a list"),
        (LETTERS, ["a", "abz"], r"texts\[1\]: character 'z' is not"),
        (NUMBERS, ["1 2"], r"texts\[0\]: the model reads numbers: give an array"),
        (LETTERS, ["a", [3, 12]], r"texts\[1\] has the token 12, .* from 0 to 11"),
        (LETTERS, [[-1]], r"texts\[0\] has the token -1"),
        (LETTERS, [[[1, 2]]], r"texts\[0\] has the shape \(1, 2\) and the type int64"),
        (LETTERS, [np.ones(3)], r"the type float64: give a text, or its tokens"),
        (LETTERS, [[[1], [2, 3]]], "in one dimension"),
        (
            LETTERS,
            ["a", "a\ud800"],
            r"texts\[1\]='a\\ud800' is not UTF-8: give another",
        ),
        (BYTES, ["a", "a\udc80"], r"texts\[1\]='a\\udc80' is not UTF-8: give another"),
        (WORDS, ["\udc80"], r"texts\[0\]='\\udc80' is not UTF-8"),
        (LETTERS, [7], r"texts\[0\] has the shape \(\)"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(
    loaded: Any, texts: Any, line: str
) -> None:
    for function in (txl_jax.score, txl_jax.hidden_states):
        with refused(line):
            function(loaded, texts)
