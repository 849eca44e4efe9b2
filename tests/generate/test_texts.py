"""Samples as text: their prompts, seeds, ends, scores and how they are shown.

Dims: T tokens of prompt and continuation.
"""

import contextlib
import functools
import io
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from txl_jax.data.detokenization import check_detokenizes, detokenize
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.generate import texts
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.texts import Growing, Sample

PARAMS = tiny.make_params()
WORDS = ["<eos>", "<unk>", "the", "cat", "dog", ",", ".", "@-@", "n't", "is", "=", "a"]
VOCAB = WordVocab(WORDS)
SPLIT_T = tiny.make_tokens(1, 40)[0]


def make_config(**fields: Any) -> GenerateConfig:
    defaults = {"num_tokens": 9, "mem_len": 8, "prompt": "the cat"}
    return GenerateConfig(**{**defaults, **fields})


def draw(
    show: texts.Show = lambda text: None, write: texts.Write = str, **fields: Any
) -> list[Sample]:
    """Returns the samples of a tiny model of words."""
    config = make_config(**fields)
    prompts = texts.read_prompts(config, VOCAB)
    model = tiny.CONFIG, PARAMS, VOCAB
    return list(texts.draw(*model, config, prompts, write, show))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Returns two samples of each of two prompts."""
    path = tmp_path_factory.mktemp("samples") / "prompts"
    path.write_text("the cat\n\na dog is a\n")
    return draw(prompt=f"@{path}", samples=2, seed=5)


def test_each_line_is_a_prompt_and_each_sample_has_its_seed(
    several: list[Sample],
) -> None:
    assert [each.prompt for each in several] == ["the cat"] * 2 + ["a dog is a"] * 2
    assert [each.seed for each in several] == [5, 6, 7, 8]
    assert len({each.text for each in several}) == 4
    for each in several:
        assert each.text.startswith(each.prompt)
        assert len(each.token_nlls) == len(each.token_texts) == 9
        assert each.text == each.prompt + "".join(each.token_texts)


def test_a_single_sample_equals_the_same_one_among_several(
    several: list[Sample],
) -> None:
    (single,) = draw(seed=8, prompt="a dog is a")
    assert single.text == several[3].text
    np.testing.assert_allclose(single.token_nlls, several[3].token_nlls, rtol=1e-4)


def test_json_has_the_scores_of_all_tokens(several: list[Sample]) -> None:
    mean = pytest.approx(np.mean(several[0].token_nlls))
    expected = several[0]._asdict() | {"step": 7, "tokens": 9, "nll": mean}
    assert several[0].describe(7) == expected


def test_a_context_comes_from_the_split() -> None:
    """Each sample draws its own by its own seed, so a single one can be repeated."""

    def contexts(**fields: Any) -> list[list[int]]:
        drawn = texts.draw_contexts(make_config(**fields), SPLIT_T, "test")
        return [context_T.tolist() for context_T in drawn]

    text = SPLIT_T.tolist()
    several = contexts(context_tokens=5, samples=3, seed=2)
    assert all(each in [text[at : at + 5] for at in range(36)] for each in several)
    assert len(set(map(str, several))) == 3
    assert contexts(context_tokens=5, seed=4) == several[2:]
    assert contexts(context_tokens=40, samples=2) == [text] * 2
    with pytest.raises(UserError, match="exceeds the test split, which has 40"):
        contexts(context_tokens=41)


@pytest.mark.parametrize(
    "stdin, expected", [(b"the dog\r\n\n", ["the dog"]), (b"\n", None)]
)
def test_prompts_come_from_stdin(
    stdin: bytes, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    refusal = pytest.raises(UserError, match="has no prompts")
    with contextlib.nullcontext() if expected else refusal:
        prompts = texts.read_prompts(make_config(prompt="@-"), VOCAB)
        assert [VOCAB.decode(each) for each in prompts] == expected


def test_what_is_shown_is_the_text() -> None:
    shown: list[str] = []
    write = functools.partial(detokenize, corpus="wikitext2")
    (only,) = draw(shown.append, write, num_tokens=40, top_k=0)
    assert "".join(shown) == only.text + "\n"
    assert len([part for part in shown if part]) > 1, "it was shown as it grew"
    plain = only.prompt + "".join(only.token_texts)
    assert only.text == write(plain) != plain


def test_a_sample_ends_before_its_stop() -> None:
    def grow(prompt: str, **fields: Any) -> Growing:
        growing = Growing(VOCAB, VOCAB.encode(prompt), GenerateConfig(**fields))
        for part in ("dog . a", "cat . is", "a a"):
            tokens_T = VOCAB.encode(part)
            growing.add(tokens_T, np.arange(len(tokens_T)) + 1.0)
        return growing

    stopped = grow("the .", stop=" .").finish(3, str)
    assert stopped == Sample("the .", "the . dog", 3, [" dog"], [1.0])
    across = grow("the", stop="a cat").finish(3, str)
    assert across.text == "the dog . "
    assert across.token_texts == [" dog", " .", " a"]
    settled = grow("the", stop="is it").settled(str)
    assert settled == "the dog . a cat . i", "all but what may become the stop"


def test_a_missing_file_of_prompts_is_refused() -> None:
    with pytest.raises(UserError, match="generate.prompt = 'nowhere' cannot be read"):
        draw(prompt="@nowhere")


def test_text_that_was_not_cut_into_words_is_not_joined() -> None:
    with pytest.raises(UserError, match="generate.detokenize is for the words of"):
        check_detokenizes("stdlib", VOCAB.kind)
