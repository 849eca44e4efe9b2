"""Tokenizers of other libraries as vocabularies."""

import json
import sys
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
    spelled = vocab.spell(made.decode, tokens_T)
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
