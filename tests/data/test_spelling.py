"""The tokens' texts, one after the other, are the text."""

import pytest

from txl_jax.data.spelling import spell
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab

WORDS = WordVocab(["<eos>", "<unk>", "the", "cat"])
MARKED = WordVocab(["<S>", "the", "cat"], Lines("<S>", "<S>"))
TEXT = "naïve 😀\n\nthe cat\n"


@pytest.mark.parametrize(
    "vocab, text",
    [
        (ByteVocab(), TEXT * 3),
        (CharVocab("".join(sorted(set(TEXT)))), TEXT * 3),
        (WORDS, "the cat\n\nthe <unk> cat\n" * 5),
        (MARKED, "the cat\n\ncat the\n" * 5),
    ],
    ids=["byte", "char", "word", "sentences"],
)
def test_together_they_are_the_text(vocab: Vocab, text: str) -> None:
    tokens_T = vocab.encode(text)
    result = spell(vocab.decode, tokens_T)
    assert len(result) == len(tokens_T)
    assert "".join(result) == text


def test_a_character_comes_with_its_last_byte_and_a_word_with_its_space() -> None:
    tokens_T = ByteVocab().encode("aé😀b")
    expected = ["a", "", "é", "", "", "", "😀", "b"]
    assert spell(ByteVocab().decode, tokens_T) == expected
    assert spell(ByteVocab().decode, tokens_T[:0]) == []
    tokens_T = WORDS.encode("the cat\ncat")
    assert spell(WORDS.decode, tokens_T) == ["the", " cat", "\n", "cat"]
    assert spell(WORDS.decode, tokens_T, before=1) == [" cat", "\n", "cat"]
