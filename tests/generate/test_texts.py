"""Samples as text: their prompts, seeds, ends, scores and display.

Dims: T tokens of prompt and continuation.
"""

import codecs
import io
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.processes import LIMIT_SECONDS
from tests.support.refusal import refused
from txl_jax.cli.draw_samples import print_first
from txl_jax.data.number import NumberVocab
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab
from txl_jax.generate import texts
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import Drawn, Sampler
from txl_jax.generate.texts import Sample

PARAMS = tiny.make_params()
WORDS = ["<eos>", "<unk>", "the", "cat", "dog", ",", ".", "@-@", "n't", "is", "=", "a"]
VOCAB = WordVocab(WORDS)
SPLIT_T = tiny.make_tokens(1, 40)[0]


def make_config(**fields: Any) -> GenerateConfig:
    defaults = {"num_tokens": 40, "mem_len": 8, "prompt": "the cat"}
    return GenerateConfig(**{**defaults, **fields})


def draw(show: texts.Show = lambda text: None, **fields: Any) -> list[Sample]:
    config = make_config(**fields)
    prompts = texts.read_prompts(config, VOCAB)
    model = tiny.CONFIG, PARAMS, VOCAB
    return list(texts.sample_prompts(*model, config, prompts, show))


def test_samples_depend_on_prompt_and_seed_and_have_scores(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("the cat\n\na dog is a\n", "utf-8-sig")
    several = draw(prompt=f"@{tmp_path}/prompts", samples=2, seed=5)
    assert [each.prompt for each in several] == ["the cat"] * 2 + ["a dog is a"] * 2
    assert [each.seed for each in several] == [5, 6, 7, 8]
    assert len({each.text for each in several}) == 4
    for each in several:
        assert len(each.token_nlls) == len(each.token_texts) == 40
        assert each.text == each.prompt + "".join(each.token_texts)
    described = several[0].describe(7)
    assert (described["step"], described["tokens"]) == (7, 40)
    assert described["nll"] == pytest.approx(np.mean(several[0].token_nlls))
    # A single sample has the same text, and is shown as it grows.
    shown: list[str] = []
    (single,) = draw(shown.append, seed=8, prompt="a dog is a")
    assert "".join(shown) == single.text + "\n"
    assert len([part for part in shown if part]) > 1
    assert single.text == several[3].text
    np.testing.assert_allclose(single.token_nlls, several[3].token_nlls, rtol=1e-4)


def test_a_context_comes_from_the_split() -> None:
    """Each sample's seed draws its context, so a single sample can be repeated."""

    def contexts(**fields: Any) -> list[list[int]]:
        drawn = texts.draw_contexts(make_config(**fields), SPLIT_T, "test")
        return [context_T.tolist() for context_T in drawn]

    text = SPLIT_T.tolist()
    several = contexts(context_tokens=5, samples=3, seed=2)
    assert all(each in [text[at : at + 5] for at in range(36)] for each in several)
    assert len(set(map(str, several))) == 3
    assert contexts(context_tokens=5, seed=4) == several[2:]
    assert contexts(context_tokens=40, samples=2) == [text] * 2
    with refused("exceeds the test split, which has 40"):
        contexts(context_tokens=41)


def test_unknown_words_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    (prompt_T,) = texts.read_prompts(
        make_config(prompt="the man <unk> the man."), VOCAB
    )
    assert VOCAB.decode(prompt_T) == "the <unk> <unk> the <unk>"
    line = "generate.prompt has 2 unknown words, read as '<unk>': man man.\n"
    assert capsys.readouterr().err == line


def test_prompts_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(stdin: bytes) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        prompts = texts.read_prompts(make_config(prompt="@-"), VOCAB)
        return [VOCAB.decode(each) for each in prompts]

    assert read(b"\xef\xbb\xbfthe dog\r\n\na cat") == ["the dog", "a cat"]


def test_an_unknown_character_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("ba\n\nb\u03bb")
    with refused("/b:3: character '\u03bb' is not in the vocabulary"):
        texts.read_prompts(make_config(prompt=f"@{tmp_path}"), CharVocab("ab"))


def test_a_sample_ends_before_its_stop() -> None:
    def grow(prompt: str, stop: str) -> Sample:
        sample = Sample(VOCAB, VOCAB.encode(prompt), 3, stop)
        for part in ("dog . a", "cat . is", "a a"):
            tokens_T = VOCAB.encode(part)
            sample.add(tokens_T, np.arange(len(tokens_T)) + 1.0)
        return sample

    stopped = grow("the .", " .")
    assert (stopped.text, stopped.token_texts) == ("the . dog", [" dog"])
    assert (stopped.token_nlls, stopped.settled()) == ([1.0], "the . dog")
    across = grow("the", "a cat")
    assert (across.text, across.token_texts) == ("the dog . ", [" dog", " .", " a"])
    settled = grow("the", "is it").settled()
    assert settled == "the dog . a cat . i", "all but the possible beginning of a stop"
    longer = grow("the", "is " * 20).settled()
    assert longer == "the", "the prompt is shown, but no part of a longer stop"


@pytest.mark.parametrize(
    "stop, text, tokens, nlls",
    [
        ("0", "60 62 11", [110], [1.0]),
        (" 5", "60 62 110", [110], [1.0]),
        ("05", "60 62 110 5 1", [110, 5, 105], [1.0, 2.0, 3.0]),
        (" 1", "60 62", [], []),
    ],
)
def test_a_stop_inside_a_token_cuts_the_text_only(
    stop: str, text: str, tokens: list[int], nlls: list[float]
) -> None:
    sample = Sample(NumberVocab(200), np.array([60, 62]), 3, stop)
    sample.add(np.array([110]), np.array([1.0]))
    sample.add(np.array([5, 105, 7]), np.array([2.0, 3.0, 4.0]))
    assert sample.text == text
    assert (sample.tokens, sample.token_nlls) == ([60, 62, *tokens], nlls)
    assert sample.token_texts == [f" {token}" for token in tokens]
    described = sample.describe(0)
    assert described["tokens"] == len(tokens)
    assert described["nll"] == (np.mean(nlls) if nlls else None)


def test_a_sample_appears_on_a_terminal_as_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A character appears with its last byte, even if another fetch has the first."""
    data, seen = "na\u00efve \u20ac3 \ufffd\ufffd \U0001f600\n".encode(), b""
    reader, writer = os.openpty()

    def stream(*_: object) -> Iterator[Drawn]:
        nonlocal seen
        for end, byte in enumerate(data, 1):
            yield Drawn(np.array([[byte]]), np.zeros((1, 1)))
            whole = b"a" + data[:end].decode(errors="ignore").encode()
            whole = whole.replace(b"\n", b"\r\n")  # as a terminal shows it
            while len(seen) < len(whole):
                assert select.select([reader], [], [], LIMIT_SECONDS)[0]
                seen += os.read(reader, 99)
            assert seen == whole

    monkeypatch.setattr(Sampler, "stream", stream)
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        model, options = (tiny.CONFIG, PARAMS, ByteVocab()), make_config()
        prompts = [np.frombuffer(b"a", np.uint8)]
        (sample,) = texts.sample_prompts(*model, options, prompts, print_first)
        assert os.read(reader, 99) == b"\r\n", "before the line of JSON"
    os.close(reader)
    assert sample.text.encode() == b"a" + data


def test_text_grows_as_it_is_decoded() -> None:
    """Characters may be cut between two parts, and bytes may be no text."""
    data = "a€😀\ufffd".encode() + b"\xff\x80b" + "é".encode()[:1]
    sample = Sample(ByteVocab(), np.array([*data[:2]]), 3)
    assert sample.prompt == "a\ufffd"
    for byte in data[2:]:
        sample.add(np.array([byte]), np.zeros(1))
        assert sample.text == codecs.utf_8_decode(bytes(sample.tokens), "replace")[0]
    sign = ByteVocab().encode("a\ufffd")
    sample = Sample(ByteVocab(), sign, 3, stop="\ufffd")
    assert sample.text == "a\ufffd"
    sample.add(np.append(ByteVocab().encode("b"), sign), np.zeros(5))
    assert sample.text == "a\ufffdba"
