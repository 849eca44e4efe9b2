"""Shuffled sentences: every epoch the whole text, sentence by sentence, once."""

from typing import Any

import numpy as np
import pytest

from tests.data.reading import of_stream, read_epoch
from txl_jax.data.streams import Streams, find_sentences, permute

END = 0


def make_text(sentences: int, seed: int = 0) -> np.ndarray:
    """Returns sentences of 1 to 12 tokens: its place in the file, then the end."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, sentences)
    text = np.arange(1, lengths.sum() + 1, dtype=np.int32)
    text[np.cumsum(lengths) - 1] = END
    return text


def split(text: np.ndarray) -> list[tuple[int, ...]]:
    bounds = find_sentences(text, END)
    return [
        tuple(text[a:b].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def make(text: np.ndarray, B: int, L: int, seed: int = 0, **other: Any) -> Streams:
    return Streams(text, B, L, seed=seed, sentence_end=END, **other)


def epoch_text(streams: Streams, epoch: int) -> np.ndarray:
    """Returns the text of an epoch, joined from the streams' segments."""
    read = read_epoch(streams, epoch)
    B = read.inputs_SBL.shape[1]
    inputs = [of_stream(read.inputs_SBL, read, b) for b in range(B)]
    targets = [of_stream(read.targets_SBL, read, b) for b in range(B)]
    text = np.concatenate([inputs[0][:1], *targets])
    np.testing.assert_array_equal(np.concatenate(inputs), text[:-1])
    return text


@pytest.mark.parametrize("B, L", [(1, 7), (8, 50), (5, 1)])
@pytest.mark.parametrize("varlen", [False, True])
def test_an_epoch_has_every_sentence_once(B: int, L: int, varlen: bool) -> None:
    """Their order depends only on seed and epoch."""
    text = make_text(60)
    streams, one = make(text, B, L, varlen=varlen), make(text, 1, 1000)
    texts = [epoch_text(streams, epoch) for epoch in range(3)]
    for epoch, whole in enumerate(texts):
        np.testing.assert_array_equal(whole, epoch_text(one, epoch))
        assert sorted(split(whole)) == sorted(split(text))
    texts += [text, epoch_text(make(text, 1, 1000, seed=4), 2)]
    assert len({whole.tobytes() for whole in texts}) == 5


@pytest.mark.parametrize(
    "text, expected",
    [
        ([5, 0, 6, 7, 0], [0, 2, 5]),
        ([5, 0, 6, 7], [0, 2, 4]),  # the last sentence does not end
        ([0, 5, 0, 0], [0, 1, 3, 4]),  # empty ones
        ([0, 5, 6, 0, 0, 7, 0], [0, 4, 7]),  # <S> words <S> <S> words <S>
        ([0, 5, 6, 0, 7, 0, 0], [0, 1, 4, 6, 7]),  # an empty one first
        ([0], [0, 1]),
    ],
)
def test_sentences_are_found(text: list[int], expected: list[int]) -> None:
    for dtype in (np.uint8, np.uint16, np.int32):
        result = find_sentences(np.array(text, dtype), END)
        assert result.tolist() == expected and result.dtype == np.int64


def test_sentences_are_found_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text(60)
    expected, order = find_sentences(text, END), permute(60, 7, 1)
    monkeypatch.setattr("txl_jax.data.streams.CHUNK_ELEMENTS", 3)
    np.testing.assert_array_equal(find_sentences(text, END), expected)
    np.testing.assert_array_equal(permute(60, 7, 1), order)


@pytest.mark.parametrize("n", [1, 2, 256, 257, 100_000])
def test_a_permutation_depends_on_seed_and_epoch(n: int) -> None:
    drawn = permute(n, 1, 0)
    np.testing.assert_array_equal(np.sort(drawn), np.arange(n))
    for other in (permute(n, 1, 1), permute(n, 2, 0)):
        assert n < 200 or (drawn != other).any()
    # Later versions must give the same numbers.
    assert permute(8, 1111, 0).tolist() == [5, 6, 3, 1, 2, 0, 7, 4]
