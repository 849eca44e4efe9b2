"""Tokenizers of other libraries as vocabularies."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.test_vocab import streamed
from tests.support.refusal import refused
from txl_jax.data import text as texts
from txl_jax.data import vocab
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.tokens import prepare
from txl_jax.data.word import WordVocab

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra subword")

models, normalizers = tokenizers.models, tokenizers.normalizers
splits, decoders = tokenizers.pre_tokenizers, tokenizers.decoders

TEXT = "the café of the river\n\n  a naïve game , 東京 😀\nand the end\n" * 20


@pytest.fixture(scope="module")
def bpe() -> SubwordVocab:
    return SubwordVocab.train([TEXT], 300)


def test_trained_bpe_is_lossless(bpe: SubwordVocab, tmp_path: Path) -> None:
    assert 256 < len(bpe) <= 300 and bpe.unknown == -1
    odd = TEXT + "\r\n\t  ünseen <eos> \u2028 \n\n\nno end"
    assert bpe.decode(bpe.encode(odd)) == odd
    assert len(bpe.encode(TEXT)) < len(TEXT.encode()) / 2
    for size in (1, 7, 10_000):
        assert streamed(bpe, odd.encode(), size) == bpe.encode(odd).tolist()
    (text := tmp_path / "text.txt").write_text(TEXT, "utf-8")
    options: dict[str, Any] = {"vocab": "subword", "vocab_size": 300}
    made = prepare(DataConfig("text", str(text), str(tmp_path), **options))
    decoded = (made.vocab.decode(made.split(split)) for split in SPLITS)
    assert "".join(decoded) == TEXT
    vocab.save(bpe, tmp_path / "v.json")
    again = vocab.load(tmp_path / "v.json")
    assert (again.encode(odd) == bpe.encode(odd)).all()
    assert again.to_json() == SubwordVocab.train([TEXT], 300).to_json()


def test_a_long_line_is_cut_at_a_space(
    bpe: SubwordVocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "LINE_BYTES", 100)
    for line in ("the café of " * 99, "東京" * 200):
        assert bpe.decode(streamed(bpe, line.encode(), 60)) == line


def test_tokenizer_json_is_read(bpe: SubwordVocab, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(bpe.to_json()["tokenizer"]))
    tokenizer.enable_truncation(2)  # must not cut a line
    tokenizer.save(str(path))
    assert (vocab.read_file(path, WordVocab).encode(TEXT) == bpe.encode(TEXT)).all()


def byte_fallback() -> SubwordVocab:
    """Returns a tokenizer like Llama's: bytes stand for unknown characters."""
    pieces = ["<unk>", "</s>", *(f"<0x{x:02X}>" for x in range(256)), "▁", "é", "a"]
    tokens = {piece: token for token, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(tokens, [], byte_fallback=True)
    made, parts = tokenizers.Tokenizer(model), tokenizers.decoders
    replace = tokenizers.normalizers.Replace(" ", "▁")
    prepend = tokenizers.normalizers.Prepend("▁")
    made.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    steps = parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()
    made.decoder = parts.Sequence([*steps, parts.Strip(" ", 1, 0)])
    return SubwordVocab(made.to_str())


@pytest.mark.parametrize("text", ["a 東京東京 é \ufffd\ufffd\ufffd 😀", "a\ufffd"])
@pytest.mark.parametrize("fallback", [False, True])
def test_tokens_of_bytes_spell_the_text(
    bpe: SubwordVocab, fallback: bool, text: str
) -> None:
    made = byte_fallback() if fallback else bpe
    tokens_T = made.encode(text)
    assert made.decode(tokens_T) == text
    spelled = [*vocab.spell(made.decode, tokens_T)]
    assert "".join(spelled) == text
    assert "".join(vocab.spell(made.decode, tokens_T, 9)) == "".join(spelled[9:])
    half_T = made.encode("a😀")[:-1]
    assert (made.decode(half_T), made.decode(half_T, False)) == ("a\ufffd", "a")


def test_decoding_agrees_with_the_library(bpe: SubwordVocab) -> None:
    library = tokenizers.Tokenizer.from_str(bpe.tokenizer.to_str())
    library.add_special_tokens(["<｜é end｜>"])
    made = SubwordVocab(library.to_str())
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens_T = rng.integers(0, len(made), 20)
        tokens = tokens_T[tokens_T != made.line_end].tolist()
        assert made.decode(tokens) == library.decode(tokens, skip_special_tokens=False)


def word_level(*words: str) -> str:
    tokens = {word: token for token, word in enumerate(words)}
    model = tokenizers.models.WordLevel(tokens, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made.to_str()


def test_line_ends_of_a_tokenizer_without_newlines() -> None:
    made = SubwordVocab.parse(word_level("[UNK]", "</s>", "a", "b"), "it")
    assert made.encode("a b\n\nb zzz").tolist() == [2, 3, 1, 1, 3, 0]
    assert made.decode([2, 3, 1, 1, 3]) == "a b\n\nb"
    assert made.unknown == 0


LETTERS = ["<unk>", "</s>", " ", ",", "▁", *map(chr, range(97, 123))]
IDS = {letter: token for token, letter in enumerate(LETTERS)}
ALPHABET = {x: n for n, x in enumerate(splits.ByteLevel.alphabet(), 1)}
HEX = {f"<0x{byte:02X}>": len(IDS) + byte for byte in range(256)}
WORDS = {"[UNK]": 0, "</s>": 1, "a": 2, "b": 3, "##b": 4}

BPE = models.BPE(IDS, [])
WORD_ENDS = {f"{letter}</w>": len(IDS) + n for n, letter in enumerate(LETTERS)}
BPE_ENDS = models.BPE({**IDS, **WORD_ENDS}, [], end_of_word_suffix="</w>")
BPE_UNK = models.BPE(IDS, [], unk_token="<unk>")
BPE_HEX = models.BPE({**IDS, **HEX}, [], byte_fallback=True)
BYTES = models.BPE({"</s>": 0, **ALPHABET}, [])
SOME_BYTES = models.BPE({"</s>": 0, "b": 1, "Ã": 2}, [])  # Ã is the first byte of é
UNIGRAM = models.Unigram([(x, -1.0) for x in LETTERS], 0)
UNIGRAM_STRICT = models.Unigram([(x, -1.0) for x in LETTERS])
WORD_LEVEL = models.WordLevel(WORDS, unk_token="[UNK]")
WORD_STRICT = models.WordLevel(WORDS, unk_token="absent")
WORD_PIECE = models.WordPiece(WORDS, unk_token="[UNK]")

META = {"pre_tokenizer": splits.Metaspace(), "decoder": decoders.Metaspace()}
LEVEL = splits.ByteLevel(add_prefix_space=False)
AS_BYTES = {"pre_tokenizer": LEVEL, "decoder": decoders.ByteLevel()}
FROM_HEX = {"decoder": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])}
SPACES = {"pre_tokenizer": splits.WhitespaceSplit()}


def normalized(*steps: Any) -> dict[str, Any]:
    return AS_BYTES | {"normalizer": normalizers.Sequence([*steps])}


def split(*steps: Any) -> dict[str, Any]:
    return AS_BYTES | {"pre_tokenizer": splits.Sequence([*steps, LEVEL])}


def replaced(pattern: str, text: str) -> dict[str, Any]:
    return normalized(normalizers.Replace(tokenizers.Regex(pattern), text))


def made_of(model: Any, parts: dict[str, Any]) -> SubwordVocab:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    return SubwordVocab.parse(made.to_str(), "it")


DIGITS = tokenizers.Regex("[0-9]")
NO_COMMA = splits.Punctuation("removed")
JAMO = "\u1112\u1161\u11ab"  # NFC composes them


@pytest.mark.parametrize(
    "model, parts, text, omitted",
    [
        (BPE, {}, "HELLO Dvořák 123 world", "H"),
        (BPE, {}, "a b\n😀", "😀"),
        (BPE, META, "a HELLO", "H"),
        (BPE, SPACES, "a \t b", ""),
        (BPE_ENDS, SPACES, "ab HELLO 12", "H"),
        (SOME_BYTES, AS_BYTES, "bé", "é"),
        (BPE_UNK, {}, "Dvořák", ""),
        (BPE_UNK, {"normalizer": normalizers.Replace(DIGITS, "")}, "É 12", "1"),
        (BPE_HEX, FROM_HEX, "Dvořák 123 😀", ""),
        (BYTES, AS_BYTES, "Dvořák 123 😀", ""),
        (UNIGRAM, META, "  Dvořák,  123 ▁", ""),
        (WORD_LEVEL, SPACES, "a c b", ""),
        (WORD_LEVEL, {"pre_tokenizer": splits.Split(DIGITS, "removed")}, "é1", "1"),
        (WORD_PIECE, SPACES | {"decoder": decoders.WordPiece()}, "ab  b 1", ""),
        (BYTES, normalized(normalizers.Lowercase()), "HELLO İ ß", ""),
        (BYTES, normalized(normalizers.NFKC()), f"ﬁ ① Ａ ﾊﾟ {JAMO}", ""),
        (
            BYTES,
            normalized(normalizers.NFD(), normalizers.StripAccents()),
            "ée\u0301",
            "",
        ),
        (BYTES, normalized(normalizers.BertNormalizer()), "É\u200b\x07 日本", ""),
        (BYTES, replaced("[0-9]", "0"), "a 12", ""),
        (BYTES, replaced("[0-9]", ""), "a1b", "1"),
        (BYTES, replaced("<.*?>", ""), "a <b>c</b>", "<"),
        (BYTES, replaced(" +", ""), "a  b", ""),
        (BYTES, split(splits.Split(DIGITS, "removed")), "a 21", "2"),
        (BYTES, split(splits.Split(DIGITS, "isolated")), "a 21", ""),
        (BYTES, split(NO_COMMA), "a, b", ","),
        (BYTES, split(splits.Whitespace()), "a, b\t c", ""),
        (BYTES, split(splits.Digits(individual_digits=True)), "a 21", ""),
    ],
)
def test_tokenizers_that_omit_text_are_refused(
    model: Any, parts: dict[str, Any], text: str, omitted: str
) -> None:
    made = made_of(model, parts)
    with refused(f"omits {omitted!r}: .* unk_token") if omitted else nullcontext():
        made.encode(text)
    if omitted:  # again, and in a split
        with refused(f"omits {omitted!r}"):
            streamed(made, text.encode(), 4)


@pytest.mark.parametrize("model", [UNIGRAM_STRICT, WORD_STRICT])
def test_unknown_text_without_a_token_is_refused(model: Any) -> None:
    with refused("the tokenizer fails .* unk_token"):
        made_of(model, SPACES).encode("a É")


def test_changes_of_text_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    made = made_of(BYTES, normalized(normalizers.Lowercase()))
    for text in ("a  b", "a Bc", "Dd"):
        made.encode(text)
    assert capsys.readouterr().err == "the tokenizer reads 'Bc' as 'bc'\n"
    for exact in (BYTES, AS_BYTES), (UNIGRAM, META), (WORD_LEVEL, SPACES):
        made_of(*exact).encode("a  b É")
    assert not capsys.readouterr().err


def test_unknown_tokens_of_a_unigram_are_counted(tmp_path: Path) -> None:
    made = made_of(UNIGRAM, META)
    vocab.save(made, tmp_path / "vocab.json")
    (text := tmp_path / "text.txt").write_text("a É\n" * 40, "utf-8")
    options: dict[str, Any] = {"vocab_path": str(tmp_path / "vocab.json")}
    splits = prepare(DataConfig("text", str(text), str(tmp_path), **options)).manifest
    assert sum(splits["splits"][x]["unknowns"] for x in SPLITS) == 40


@pytest.mark.parametrize(
    "library, error",
    [
        (None, "tokenizers, which is not installed"),
        (SimpleNamespace(__version__="0.15.2", Tokenizer=object), "not 0.15.2"),
    ],
)
def test_missing_and_old_libraries_name_the_extra(
    library: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    with refused(rf"{error}: pip install 'txl_jax\[subword\]'"):
        SubwordVocab.parse("", "it")
