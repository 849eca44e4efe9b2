"""Text to tokens and back."""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.data import vocab
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import PAPER, Lines, WordVocab

TENSORFLOW = Lines("<S>", "<S>")


def chopped(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def streamed(made: vocab.Vocab, data: bytes, size: int) -> list[int]:
    arrays = list(made.stream(chopped(data, size), "the text"))
    assert {array.dtype for array in arrays} <= {made.dtype}
    return [int(token) for array in arrays for token in array]


def count_words(
    text: bytes, lines: Lines = PAPER, size: int = 7, **limits: Any
) -> WordVocab:
    counts: collections.Counter[str] = collections.Counter()
    for words in lines.stream(chopped(text, size), "it"):
        counts.update(words)
    return WordVocab.choose(counts, lines, **limits)


def test_bytes_round_trip() -> None:
    made, every = ByteVocab(), bytes(range(256))
    assert len(made) == 256 and made.dtype == np.uint8 and made.unknown == -1
    assert streamed(made, every, 100) == list(every)
    assert made.decode(made.encode("naïve 😀\n")) == "naïve 😀\n"
    assert made.encode("é").tolist() == [0xC3, 0xA9]
    # Python decodes invalid bytes of a command line as surrogates.
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert made.encode(argument).tobytes() == b"caf\xe9"
    with refused(r"the text='\\ud800' is not UTF-8"):
        made.encode("\ud800")
    assert len(made.encode("")) == 0 and made.decode([]) == ""
    assert made.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    assert made.decode(np.array([104, 105], np.int32)) == "hi"
    with pytest.raises(IndexError):
        made.decode([256])


def test_characters_by_count_then_first_occurrence() -> None:
    text = "bca\nccé😀é"
    for size in (1, 2, 3, 99):
        points = vocab.code_points(chopped(text.encode(), size), "it", False)
        made = CharVocab.count([points], of_bytes=False)
        assert made.symbols == "céba\n😀"
        assert made.decode(streamed(made, text.encode(), size)) == text
    with refused("character 'x' is not in the vocabulary"):
        made.encode("bax")


def test_characters_may_be_bytes() -> None:
    data = b"b\xffaa\xc3\xa9b\n"
    splits = [vocab.code_points([data], "it", True)]
    made = CharVocab.count(splits, of_bytes=True)
    assert made.symbols == "ba\xff\xc3\xa9\n"
    assert streamed(made, data, 3) == [0, 2, 1, 1, 3, 4, 0, 5]
    assert made.decode(made.encode("aéb")) == "aéb"
    assert made.decode([2]) == "\ufffd"
    with refused("byte 120 is not in the vocabulary"):
        made.encode("x")
    with pytest.raises(ValueError, match="latin-1"):
        CharVocab("a\u0100", of_bytes=True)


PROSE = " b a\n\n a c  b\ta \n <unk> é d"


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "lines, text, words, tokens",
    [
        (
            PAPER,
            PROSE,
            "<eos> a b c <unk> é d",
            [2, 1, 0, 0, 1, 3, 2, 1, 0, 4, 5, 6, 0],
        ),
        (TENSORFLOW, "a b\n\nb c", "<S> b a c", [0, 2, 1, 0, 0, 0, 0, 1, 3, 0]),
        (Lines("</S>"), "a b\n\nb c", "</S> b a c", [2, 1, 0, 0, 1, 3, 0]),
    ],
)
def test_words_by_count_then_first_occurrence(
    lines: Lines, text: str, words: str, tokens: list[int], size: int
) -> None:
    made = count_words(text.encode(), lines=lines, size=size)
    assert made.words == words.split()
    assert streamed(made, text.encode(), size) == tokens
    written = "".join(" ".join(line.split()) + "\n" for line in text.split("\n"))
    assert made.decode(tokens) == written
    assert made.encode(written).tolist() == tokens


@pytest.mark.parametrize(
    "text, limits, words",
    [
        ("a a a b b c\n", {"max_size": 3}, ["<eos>", "<unk>", "a"]),
        ("a a a b b c\n", {"max_size": 4}, ["<eos>", "a", "b", "c"]),
        ("a a a b b c\n", {"max_size": 1}, ["<eos>", "<unk>"]),
        # <unk> keeps its place if the text has it.
        ("a a a <unk> <unk> c\n", {"max_size": 3}, ["<eos>", "a", "<unk>"]),
        ("É a é", {"lines": Lines(lower_case=True)}, ["<eos>", "é", "a"]),
    ],
)
def test_rare_words_become_unknown(
    text: str, limits: dict[str, Any], words: list[str]
) -> None:
    made = count_words(text.encode(), **limits)
    assert made.words == words
    if "<unk>" in words:
        assert made.encode("c").tolist() == [words.index("<unk>")] == [made.unknown]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_text_that_is_not_utf8_names_its_byte(size: int) -> None:
    data = b"caf\xc3\xa9 na\xefve\n"
    message = "it is not UTF-8 at byte 8: convert it"
    with refused(message):
        count_words(data, size=size)
    with refused(message):
        list(vocab.code_points(chopped(data, size), "it", False))


def test_a_list_of_words_is_read(tmp_path: Path) -> None:
    for size, dtype in ((256, "uint8"), (257, "uint16"), (65537, "int32")):
        assert WordVocab(["<eos>", *map(str, range(size - 1))]).dtype == dtype
    path = tmp_path / "words.txt"
    path.write_text("<S> 12\n</S> 11\n<UNK> 9\nthe 7\n", "utf-8")
    made = vocab.read_file(path, lambda words: WordVocab(words, TENSORFLOW))
    assert made.encode("the zebra").tolist() == [0, 3, 2] and made.unknown == 2
    path.write_text("<eos>\na\nb\na\n", "utf-8-sig")
    assert vocab.read_file(path, WordVocab).to_json()["words"] == ["<eos>", "a", "b"]
    path = tmp_path / "vocab.json"
    path.write_text(vocab.dumps(made), "utf-8-sig")
    assert vocab.read_file(path, WordVocab).to_json() == made.to_json()


@pytest.mark.parametrize(
    ("made", "text", "found"),
    [
        (ByteVocab(), "\n", 10),
        (ByteVocab(), r"\n", 10),
        (ByteVocab(), "0", 48),
        (ByteVocab(), "\udcff", 255),
        (ByteVocab(), "é", "'é' is 2 tokens in this vocabulary"),
        (CharVocab("aé"), "b", "'b' is not in the vocabulary"),
        (WordVocab(["<S>", "é", "x"], TENSORFLOW), "<S>", 0),
        (WordVocab(["a", "<eos>", "<unk>"]), r"\n", 1),
        (WordVocab(["a", "<eos>", "<unk>"]), "b", "'b' is unknown in"),
    ],
)
def test_a_token_is_found_by_its_text(
    made: vocab.Vocab, text: str, found: int | str
) -> None:
    if isinstance(found, int):
        assert vocab.find_token(made, text) == found
        return
    with refused(found):
        vocab.find_token(made, text)


@pytest.mark.parametrize("made", [CharVocab("a"), WordVocab(["a", "<eos>"])])
def test_a_file_with_an_unknown_symbol_is_named(made: vocab.Vocab) -> None:
    with refused("a.txt: .* 'b' is not in the vocabulary"):
        [*made.stream([b"b"], "a.txt")]


WORDS = WordVocab(["<eos>", "<unk>", "the", "cat"])
MARKED = WordVocab(["<S>", "the", "cat"], TENSORFLOW)
TEXT = "naïve 😀\n\nthe cat\n"


LOWER = WordVocab(["<eos>", "\u2028x", "é"], Lines(lower_case=True))
# Characters of the text, not signs of incomplete ones.
SIGNS = "a " + "\ufffd" * 20 + " \ufffd\n\ufffd\ufffd"


@pytest.mark.parametrize(
    "made, text",
    [
        (ByteVocab(), TEXT * 3),
        (CharVocab("".join(sorted(set(TEXT)))), TEXT * 3),
        (CharVocab("aé\xff", of_bytes=True), "aa"),
        (WORDS, "the cat\n\nthe <unk> cat\n" * 5),
        (MARKED, "the cat\n\ncat the\n" * 5),
        (LOWER, "é\né é\n"),
        (ByteVocab(), SIGNS),
        (CharVocab("a\ufffd \n"), SIGNS),
        (CharVocab("a\xef\xbf\xbd \n", of_bytes=True), SIGNS),
        (WordVocab(["<eos>", *SIGNS.split()]), SIGNS),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_a_saved_vocabulary_spells_the_text(
    made: vocab.Vocab, text: str, tmp_path: Path
) -> None:
    vocab.save(made, tmp_path / "vocab.json")
    again = vocab.load(tmp_path / "vocab.json")
    assert type(again) is type(made) and again.to_json() == made.to_json()
    if made is LOWER:
        assert "é" in (tmp_path / "vocab.json").read_text("utf-8"), "as it is"
    tokens_T = again.encode(text)
    result = [*vocab.spell(again.decode, tokens_T)]
    assert len(result) == len(tokens_T)
    assert "".join(result) == text


def test_a_character_comes_with_its_last_byte_and_a_word_with_its_space() -> None:
    tokens_T = ByteVocab().encode("aé😀b")
    expected = ["a", "", "é", "", "", "", "😀", "b"]
    assert [*vocab.spell(ByteVocab().decode, tokens_T)] == expected
    assert [*vocab.spell(ByteVocab().decode, tokens_T[:0])] == []
    broken_T = np.frombuffer(b"\xe2\x82a\xff\xc3", np.uint8)
    expected = ["", "", "\ufffda", "\ufffd", ""]
    assert [*vocab.spell(ByteVocab().decode, broken_T)] == expected
    tokens_T = WORDS.encode("the cat\ncat")
    assert [*vocab.spell(WORDS.decode, tokens_T)] == ["the", " cat", "\n", "cat"]
    assert [*vocab.spell(WORDS.decode, tokens_T, before=1)] == [" cat", "\n", "cat"]
