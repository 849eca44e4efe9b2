"""A text's tokens cost what evaluation says, each document read from the start.

Dims: B = 1 stream, T tokens of a document, D model.
"""

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.evaluate import score
from txl_jax.evaluate.perplexity import EvalConfig, make_evaluate
from txl_jax.evaluate.score import Document, Score, ScoreConfig, Scores
from txl_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")

PARAMS = tiny.make_params()
NOTHING_T = np.zeros(0, np.int32)
TOKENS_T = tiny.make_tokens(1, 23)[0]
MEMORY = EvalConfig(streams=1, tgt_len=5, mem_len=9)
WINDOW = EvalConfig(streams=1, tgt_len=3, mem_len=0, ext_len=4)


@pytest.fixture(scope="module")
def with_memory() -> Score:
    return score.make_score(tiny.CONFIG, MEMORY, PARAMS, hidden=True)


def total(how: EvalConfig, scored: Scores) -> None:
    """Compares with what evaluation makes of the same tokens."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    evaluate = make_evaluate(tiny.CONFIG, how, mesh)
    expected = evaluate(PARAMS, TOKENS_T, lambda done, total: None)
    assert np.isnan(scored.nll_T[0]) and np.isfinite(scored.nll_T[1:]).all()
    assert expected["nll"] == pytest.approx(np.nanmean(scored.nll_T), rel=tiny.FLOAT32)


def test_nll_is_that_of_evaluation(with_memory: Score) -> None:
    scored = with_memory(TOKENS_T, NOTHING_T)
    total(MEMORY, scored)
    again = with_memory(TOKENS_T, NOTHING_T)
    np.testing.assert_array_equal(again.nll_T, scored.nll_T, "memory was empty again")


def test_a_model_without_memory_reads_windows() -> None:
    read = score.make_score(tiny.CONFIG, WINDOW, PARAMS, hidden=False)
    scored = read(TOKENS_T, NOTHING_T)
    total(WINDOW, scored)
    assert scored.hidden_TD.shape == (0, tiny.D)


def test_hidden_states_are_those_of_a_plain_reading(with_memory: Score) -> None:
    config = tiny.config(mem_len=9)
    expected_BTD, _ = tiny.read(config, PARAMS, TOKENS_T[None], 5)
    tiny.assert_close(with_memory(TOKENS_T, NOTHING_T).hidden_TD, expected_BTD[0])


@pytest.mark.parametrize("skip", [1, 2, 7])
def test_a_prefix_is_read_and_not_scored(with_memory: Score, skip: int) -> None:
    whole = with_memory(TOKENS_T, NOTHING_T)
    rest = with_memory(TOKENS_T[skip:], TOKENS_T[:skip])
    tiny.assert_close(rest.nll_T, whole.nll_T[skip:])
    tiny.assert_close(rest.hidden_TD, whole.hidden_TD[skip:])


def test_a_document_may_be_empty_or_one_token(with_memory: Score) -> None:
    empty = with_memory(NOTHING_T, NOTHING_T)
    assert (empty.nll_T.shape, empty.hidden_TD.shape) == ((0,), (0, tiny.D))
    one = with_memory(TOKENS_T[:1], NOTHING_T)
    assert np.isnan(one.nll_T).tolist() == [True]
    assert one.hidden_TD.shape == (1, tiny.D)
    assert np.isfinite(with_memory(NOTHING_T, TOKENS_T[:2]).nll_T).all()


# What is written. The scores here are 1, 2, 3...

WORDS = WordVocab(["<eos>", "<unk>", "the", "cat"])


def count(tokens_T: np.ndarray, prefix_T: np.ndarray) -> Scores:
    nll_T = np.arange(len(tokens_T), dtype=float) + len(prefix_T)
    nll_T[nll_T == 0] = np.nan
    return Scores(nll_T, np.ones((len(tokens_T), 2), np.float32))


def write(tmp_path: Path, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Scores two files; returns the totals and the lines that were written."""
    (tmp_path / "texts").mkdir(exist_ok=True)
    (tmp_path / "texts" / "1.txt").write_text("the cat\ndog the")
    (tmp_path / "texts" / "2.txt").write_text("<unk>\n")
    output = tmp_path / "out.jsonl"
    what = ScoreConfig(path=str(tmp_path / "texts"), output=str(output), **fields)
    documents = score.read_documents(what.path, WORDS, False)
    result = score.score_all(documents, count, WORDS, what)
    return result, [json.loads(line) for line in output.read_text().splitlines()]


def test_totals_and_documents(tmp_path: Path) -> None:
    result, lines = write(tmp_path, per="document")
    names = ("tokens", "scored_tokens", "total_nll_nats", "bytes", "unknown_tokens")
    assert [result[name] for name in names] == [8, 6, 16, 21, 2]
    assert result["nll"] == pytest.approx(16 / 6)
    assert result["ppl"] == pytest.approx(np.exp(16 / 6))
    assert result["bits_per_byte"] == pytest.approx(16 / 21 / np.log(2))
    assert result["unknown_is"] == "<unk>"
    assert result["documents"] == lines
    assert [[line[name] for name in names] for line in lines] == [
        [6, 5, 15, 15, 1],
        [2, 1, 1, 6, 1],
    ]


def test_lines(tmp_path: Path) -> None:
    _, lines = write(tmp_path)
    found = [(line["line"], line["text"], line["total_nll_nats"]) for line in lines]
    assert found == [(1, "the cat\n", 3), (2, "<unk> the\n", 12), (1, "<unk>\n", 1)]
    assert [line["scored_tokens"] for line in lines] == [2, 3, 1]


def test_tokens(tmp_path: Path) -> None:
    _, lines = write(tmp_path, per="token", prefix="the\n")
    first, *_, last = lines
    place = {"document": str(tmp_path / "texts/1.txt"), "line": 1, "index": 0}
    assert first == {**place, "token": 2, "text": "the", "nll": 2}
    assert (last["line"], last["text"], last["nll"]) == (1, "\n", 3)
    assert [line["line"] for line in lines] == [1, 1, 1, 2, 2, 2, 1, 1]
    _, lines = write(tmp_path, per="token")
    assert lines[0]["nll"] is None, "nothing precedes it"


def test_hidden_states_are_written_by_document(tmp_path: Path) -> None:
    write(tmp_path, hidden=str(tmp_path / "states.npz"))
    with np.load(tmp_path / "states.npz") as states:
        assert [states[f"document_{n}"].shape for n in (0, 1)] == [(6, 2), (2, 2)]


def test_stdin_and_texts_that_lose_their_newlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"ab\nba\n"))
    monkeypatch.setattr("sys.stdin", given)
    vocab = CharVocab("ab", of_bytes=True)
    (document,) = score.read_documents("-", vocab, drop_newlines=True)
    assert (document.name, document.bytes) == ("stdin", 6)
    assert document.tokens_T.tolist() == [0, 1, 1, 0]
    (line,) = score.parts("line", document, np.ones(4), vocab)
    assert line["text"] == "abba"


def test_what_a_vocabulary_lacks_is_said_or_refused(tmp_path: Path) -> None:
    assert score.treat_unknown(ByteVocab(), 0)["unknown_is"] == "nothing is unknown"
    assert score.treat_unknown(CharVocab("ab"), 0)["unknown_is"] == "refused"
    (tmp_path / "text").write_text("abc")
    with pytest.raises(UserError, match="character 'c' is not in the vocabulary"):
        list(score.read_documents(str(tmp_path / "text"), CharVocab("ab"), False))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="score.path='nowhere' does not exist"):
        list(score.read_documents("nowhere", WORDS, False))
    with pytest.raises(UserError, match="score.per = 'word' is none of document"):
        ScoreConfig(per="word")
    with pytest.raises(UserError, match="score.hidden = 'x.npy' is written as .npz"):
        ScoreConfig(hidden="x.npy")
    for name in ("output", "hidden"):
        what = ScoreConfig(**{name: str(tmp_path / "none" / "x.npz")})
        documents = iter([Document("it", TOKENS_T[:2] * 0, 1)])
        with pytest.raises(UserError, match=f"score.{name} = .* cannot be written"):
            score.score_all(documents, count, WORDS, what)
