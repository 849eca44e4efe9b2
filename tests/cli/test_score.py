"""The files and totals of the mode `score`.

The scores are invented: 1, 2, 3, ... Dims: T tokens of a document.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.cli import score_texts
from txl_jax.cli.score_texts import Document, score_units
from txl_jax.data import files
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab
from txl_jax.evaluate.options import ScoreConfig
from txl_jax.evaluate.text_reader import Results

WORDS = WordVocab(["<eos>", "<unk>", "the", "cat"])


def count(
    texts: Iterable[np.ndarray], prefix_T: np.ndarray
) -> Iterator[Iterator[Results]]:
    """Yields parts of four tokens, so that lines cross them."""
    for tokens_T in texts:
        nll_T = np.arange(len(tokens_T), dtype=float) + len(prefix_T)
        nll_T[nll_T == 0] = np.nan
        parts = (nll_T[at : at + 4] for at in range(0, len(nll_T), 4))
        yield ({"nll": x, "hidden": np.ones((len(x), 2), np.float32)} for x in parts)


def write(tmp_path: Path, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Scores two files; returns the totals and the written lines."""
    (tmp_path / "texts").mkdir(exist_ok=True)
    (tmp_path / "texts" / "1.txt").write_text("the cat\ndog the")
    (tmp_path / "texts" / "2.txt").write_text("<unk>\n")
    output = tmp_path / "out.jsonl"
    output.write_text("")
    options = {"path": str(tmp_path / "texts"), "output": str(output), **fields}
    config = ScoreConfig(**options)
    documents = score_texts.read_documents(
        config, files.text_inputs(config.path, "score.path"), WORDS, False
    )
    result = score_texts.score_documents(documents, count, WORDS, config)
    return result, [json.loads(line) for line in output.read_text().splitlines()]


def test_totals_and_documents(tmp_path: Path) -> None:
    result, lines = write(tmp_path, per="document")
    assert result["output"] == str(tmp_path / "out.jsonl")
    shown = write(tmp_path, output="")[0]
    assert (shown.pop("documents"), shown.pop("output")) == (lines, "")
    assert shown.items() <= result.items() and "documents" not in result
    names = ("tokens", "scored_tokens", "total_nll_nats", "bytes", "unknown_tokens")
    assert [result[name] for name in names] == [8, 6, 16, 21, 2]
    assert result["nll"] == pytest.approx(16 / 6)
    assert result["ppl"] == pytest.approx(np.exp(16 / 6))
    assert result["bits_per_byte"] == pytest.approx(16 / 21 / np.log(2))
    assert result["unknown_is"] == "<unk>"
    assert [[line[name] for name in names] for line in lines] == [
        [6, 5, 15, 15, 1],
        [2, 1, 1, 6, 1],
    ]


def test_lines_and_tokens(tmp_path: Path) -> None:
    _, lines = write(tmp_path)
    actual = [(line["line"], line["text"], line["total_nll_nats"]) for line in lines]
    assert actual == [(1, "the cat\n", 3), (2, "<unk> the\n", 12), (1, "<unk>\n", 1)]
    assert [line["scored_tokens"] for line in lines] == [2, 3, 1]
    _, lines = write(tmp_path, per="token", prefix="the\n")
    first, *_, last = lines
    place = {"document": str(tmp_path / "texts/1.txt"), "line": 1, "index": 0}
    assert first == {**place, "token": 2, "text": "the", "nll": 2}
    assert (last["line"], last["text"], last["nll"]) == (1, "\n", 3)
    assert [line["line"] for line in lines] == [1, 1, 1, 2, 2, 2, 1, 1]
    _, lines = write(tmp_path, per="token")
    assert lines[0]["nll"] is None, "nothing precedes it"
    result, _ = write(tmp_path, output=str(tmp_path / "states.npz"))
    assert len(result["documents"]) == 2, "the file has their states in this order"
    with np.load(tmp_path / "states.npz") as states:
        assert [states[f"document_{n}"].shape for n in (0, 1)] == [(6, 2), (2, 2)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("the cat\n\ndog", ["the cat\n", "\n", "<unk>\n"]),
        ("the\r\nthe\rcat\n", ["the\n", "the cat\n"]),
    ],
)
def test_lines_are_documents(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "text"
    path.write_text(text)
    config = ScoreConfig(path=str(path), lines=True)
    documents = list(
        score_texts.read_documents(
            config, files.text_inputs(config.path, "score.path"), WORDS, False
        )
    )
    assert [WORDS.decode(each.tokens_T) for each in documents] == expected
    names = [f"{path}:{n}" for n in range(1, len(expected) + 1)]
    assert [each.name for each in documents] == names


def test_lines_and_tokens_of_characters_of_several_bytes() -> None:
    text = "aé\n\nnaïve 😀\nab"
    document = Document("text", ByteVocab().encode(text), len(text.encode()))
    nll_T = np.arange(len(document.tokens_T), dtype=np.float32)
    lines = list(score_units("line", document, nll_T.tolist(), ByteVocab()))
    assert [line["text"] for line in lines] == text.splitlines(keepends=True)
    assert [line["tokens"] for line in lines] == [4, 1, 12, 2]
    assert [line["total_nll_nats"] for line in lines] == [6, 4, 126, 35]
    tokens = list(score_units("token", document, nll_T.tolist(), ByteVocab()))
    assert "".join(token["text"] for token in tokens) == text
    assert [token["nll"] for token in tokens] == nll_T.tolist()


def test_a_file_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [b"the c", b"at\ndo", b"g", b" the"]
    monkeypatch.setattr(files, "read_blocks", lambda file: iter(blocks))
    for lines, expected in (
        (False, ["the cat\n<unk> the\n"]),
        (True, ["the cat\n", "<unk> the\n"]),
    ):
        config = ScoreConfig(lines=lines)
        found = [*score_texts.read_documents(config, [tmp_path], WORDS, False)]
        assert [WORDS.decode(each.tokens_T) for each in found] == expected
        assert sum(each.bytes for each in found) == 15


def test_stdin_and_unknown_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfab\nba\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    vocab = CharVocab("ab", of_bytes=True)
    (document,) = score_texts.read_documents(ScoreConfig(), [None], vocab, True)
    assert (document.name, document.bytes) == ("stdin", 6)
    assert document.tokens_T.tolist() == [0, 1, 1, 0]
    (line,) = score_units("line", document, np.ones(4), vocab)
    assert line["text"] == "abba"


def test_files_that_cannot_be_scored_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("abba")
    (tmp_path / "2.txt").write_text("abc")
    documents = score_texts.read_documents(
        ScoreConfig(), sorted(tmp_path.iterdir()), CharVocab("ab"), False
    )
    with refused("2.txt: character 'c' is not"):
        list(documents)
    os.mkfifo(tmp_path / "pipe")
    with refused("score.path=.* is a pipe or a device: give a file"):
        files.text_inputs(str(tmp_path / "pipe"), "score.path")
