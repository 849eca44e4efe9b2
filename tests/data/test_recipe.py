"""The tokens of published corpora, and of other texts under all vocabularies."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.streams import Position, Streams
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.data.word import Lines, WordVocab


def write_text(
    folder: Path, train: str, valid: str = "a b\n", test: str = "a\n"
) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return str(folder)


def words_of(made: Tokens, split: str) -> list[str]:
    assert isinstance(made.vocab, WordVocab)
    return [made.vocab.words[token] for token in made.split(split)]


def check_bytes(name: str, data_dir: Path, convention: str = "") -> None:
    """Checks that the corpus is stored unchanged, and that nothing else is needed."""
    shutil.rmtree(data_dir / "downloads")
    (folder,) = (data_dir / "txl_jax" / name).iterdir()
    assert folder.name == "1.0.0"
    made = prepare(DataConfig(name, "", str(data_dir), "byte", convention))
    for split, raw in miniatures.splits(name).items():
        assert made.split(split).tobytes() == raw


def test_wikitext2_has_the_published_counts(tmp_path: Path) -> None:
    real = Path(os.environ.get("TXL_JAX_TEST_DATA", "no-such-folder")) / "wikitext2"
    if not real.is_dir():
        pytest.skip("TXL_JAX_TEST_DATA names no folder with the real files")
    folder = tmp_path / "downloads" / "manual" / "wikitext-2"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(real.absolute())
    made = prepare(DataConfig("wikitext2", data_dir=str(tmp_path)))
    counts = made.manifest
    tokens = [counts["splits"][split]["tokens"] for split in SPLITS]
    assert tokens == [2_088_628, 217_646, 245_569]
    kinds = counts["types"], counts["dtype"], counts["vocab"]
    assert kinds == (33_278, "uint16", "word")
    for split in SPLITS:
        # Every line ends, so the published word count is words and lines.
        count = made.denominators(split)
        assert count["words"] + count["lines"] == len(made.split(split))
        raw = (folder / f"wiki.{split}.tokens").read_text("utf-8")
        lines = [" ".join(line.split()) for line in raw.split("\n")]
        assert made.vocab.decode(made.split(split)) == "\n".join(lines)
        assert len(raw.encode()) == counts["splits"][split]["bytes"]


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2", "ptb"])
def test_words_match_the_original_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = miniatures.install(name, tmp_path, monkeypatch)
    made = prepare(DataConfig(name, data_dir=str(tmp_path)))
    texts = {split: raw.decode() for split, raw in miniatures.splits(name).items()}
    if corpus.lower:
        texts = {split: text.lower() for split, text in texts.items()}
    counts: dict[str, int] = {}
    for split in corpus.vocab_splits:
        for word in texts[split].split():
            counts[word] = counts.get(word, 0) + 1
    words = ["<eos>", *sorted(counts, key=lambda word: -counts[word])]
    assert isinstance(made.vocab, WordVocab) and made.vocab.words == words
    for split, text in texts.items():
        lines = text.removesuffix("\n").split("\n")
        flat = [word for line in lines for word in (*line.split(), "<eos>")]
        expected = [word if word in words else "<unk>" for word in flat]
        assert words_of(made, split) == expected
        unknown = expected.count("<unk>")
        assert made.manifest["splits"][split]["unknowns"] == unknown
    check_bytes(name, tmp_path)


@pytest.mark.parametrize(
    "name, convention",
    [("enwik8", ""), ("enwik8", "newlines_kept"), ("text8", ""), ("shakespeare", "")],
)
def test_characters_match_the_published_corpora(
    name: str, convention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miniatures.install(name, tmp_path, monkeypatch)
    made = prepare(DataConfig(name, data_dir=str(tmp_path), convention=convention))
    original = data = miniatures.splits(name)
    if name == "enwik8" and not convention:
        data = {split: raw.replace(b"\n", b"") for split, raw in data.items()}
        byte = prepare(DataConfig(name, data_dir=str(tmp_path), vocab="byte"))
        assert byte.split("test").tobytes() == data["test"]
    else:
        check_bytes(name, tmp_path, convention)
    types = len(set(b"".join(data.values())))
    assert len(made.vocab) == made.manifest["types"] == types
    for split, raw in data.items():
        assert made.vocab.decode(made.split(split)) == raw.decode(errors="replace")
        counts = made.denominators(split)
        assert counts["tokens"] == counts["bytes"] == len(raw)
        assert counts["original_bytes"] == len(original[split])


def test_lm1b_has_two_conventions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miniatures.install("lm1b", tmp_path, monkeypatch)

    def check(convention: str, first: str, last: str) -> list[str]:
        config = DataConfig("lm1b", data_dir=str(tmp_path), convention=convention)
        made = prepare(config)
        assert isinstance(made.vocab, WordVocab)
        known = made.vocab.words
        for split, raw in miniatures.splits("lm1b").items():
            flat: list[str] = []
            for line in raw.decode().removesuffix("\n").split("\n"):
                flat += [*first.split(), *line.split(), last]
            expected = [word if word in known else "<UNK>" for word in flat]
            assert words_of(made, split) == expected
        return known

    # The published list has <S> twice; the original code uses one of them.
    listed = [*dict.fromkeys(miniatures.TYPES.split()[::2])]
    assert check("", "<S>", "<S>") == check("words", "", "</S>") == listed
    types = tmp_path / "downloads" / "manual" / "1b_word_vocab.txt"
    types.write_bytes(types.read_bytes()[::-1])
    with refused("1b_word_vocab.txt is .* a different file"):
        check("", "<S>", "<S>")
    types.unlink()
    assert "<UNK>" not in check("", "<S>", "<S>")
    check_bytes("lm1b", tmp_path)


def test_a_vocabulary_file_encodes_another_corpus(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", "a b c\n")

    def make(file: Path) -> Tokens:
        config = DataConfig("text", path, str(tmp_path), vocab_path=str(file))
        return prepare(config)

    words = tmp_path / "words.txt"
    words.write_text("<eos>\nb\n<unk>\na\n")
    made = make(words)
    assert made.split("train").tolist() == [3, 1, 2, 0]
    assert made.manifest["splits"]["train"]["unknowns"] == 1
    # A saved vocabulary keeps its marks even if the corpus would have others.
    marked = WordVocab(["</S>", "a", "b", "c"], Lines("</S>"))
    vocabulary.save(marked, tmp_path / "vocab.json")
    own = make(tmp_path / "vocab.json")
    assert own.split("train").tolist() == [1, 2, 3, 0]
    assert own.manifest["convention"] == "words"
    assert own.folder != made.folder


@pytest.mark.parametrize("kind, end", [("word", "<eod>"), ("byte", "\f")])
def test_files_are_documents(kind: str, end: str, tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", "")
    for name in "ab":
        (tmp_path / "text" / f"{name}_train.txt").write_text("a b")
    config = DataConfig("text", path, str(tmp_path), kind, document_end=end)
    made = prepare(config)
    tokens = made.split("train")
    assert made.vocab.decode(tokens) == f"a b\n{end}\n" * 2
    at = vocabulary.find_token(made.vocab, end)
    streams = Streams(tokens, 1, len(tokens), reset_memory_at=at)
    _, second, _ = np.flatnonzero(streams.batch(Position())[0].first_SBL)
    assert made.vocab.decode(tokens[second:]) == f"{end}\na b\n{end}\n"
