"""Tokenizers of other libraries as vocabularies."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
