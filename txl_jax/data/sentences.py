"""Shuffled sentences: every epoch the same text in another order (One Billion Word).

An epoch's text is a seeded permutation of all sentences, joined; Streams cuts it like
any other text. Nothing is dropped, no token is copied, and any position of any epoch
can be read at once.

Dims: n sentences, which a token file of N tokens has.
"""

from collections.abc import Callable

import numpy as np

from txl_jax.data.streams import SHUFFLE, Order, as_it_stands, draw
from txl_jax.errors import UserError

# How much of the file or of the permutation is worked on at once.
CHUNK = 2**22


def find_sentences(tokens: np.ndarray, sentence_end: int) -> np.ndarray:
    """Returns where each sentence starts, and N at the end: int64 [n + 1].

    A sentence goes on to the next token sentence_end, which is its last. Where all
    sentences begin with that token as well (`<S> words <S>`, TensorFlow's lm1b), they
    are cut between the two. What follows the last one counts as a sentence.

    Raises UserError when there is no such token.
    """
    tokens = np.asarray(tokens)
    ends = np.concatenate(
        [
            np.flatnonzero(tokens[at : at + CHUNK] == sentence_end) + (at + 1)
            for at in range(0, len(tokens), CHUNK)
        ]
    )
    if not len(ends):
        raise UserError(
            f"train.sentence_end = {sentence_end} is no token of the text: give the id "
            'of what ends a sentence, or set train.order = "stream"'
        )
    if ends[0] == 1 and len(ends) % 2 == 0 and (ends[1:-1:2] + 1 == ends[2::2]).all():
        ends = ends[1::2]
    rest = [len(tokens)] if ends[-1] < len(tokens) else []
    return np.concatenate([[0], ends, rest]).astype(np.int64)


def permute(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of n numbers, in the smallest unsigned type.

    It sorts random bits that carry the number itself in their lowest places: no two
    are equal, so every way of sorting gives the same.
    """
    low = (1 << n.bit_length()) - 1
    keys = np.empty(n, np.uint64)
    for at in range(0, n, CHUNK):
        number = np.arange(at, min(at + CHUNK, n), dtype=np.uint64)
        bits = draw(seed, SHUFFLE, epoch, number)
        keys[at : at + CHUNK] = bits & (2**64 - 1 - low) | number
    keys.sort()
    keys &= low
    return keys.astype(np.min_scalar_type(n))


class ShuffledSentences:
    """The order of the sentences, epoch by epoch; call it as an `Order`.

    It keeps 8 bytes for each sentence, and 12 more for the epoch that was read last,
    which is made anew when another is asked for.
    """

    def __init__(self, tokens: np.ndarray, sentence_end: int, seed: int):
        """Reads the whole file once; raises UserError without a sentence's end."""
        self.start = find_sentences(tokens, sentence_end)
        self.seed = seed
        self.epoch = -1

    def _make(self, epoch: int) -> None:
        self.epoch = -1
        self.sentence = self.end = np.empty(0, int)  # two epochs at once need not fit
        self.sentence = permute(len(self.start) - 1, self.seed, epoch)
        # end[k]: where the k-th sentence of this epoch ends in the epoch's text.
        self.end = np.diff(self.start)[self.sentence]
        np.cumsum(self.end, out=self.end)
        self.epoch = epoch

    def __call__(self, epoch: int, position: np.ndarray) -> np.ndarray:
        """Returns where in the file the positions of the epoch's text lie."""
        if epoch != self.epoch:
            self._make(epoch)
        k = np.searchsorted(self.end, position, side="right")
        return position - self.end[k] + self.start[self.sentence[k] + 1]


def _stream(tokens: np.ndarray, sentence_end: int, seed: int) -> Order:
    return as_it_stands


# train.order: the text that B streams are cut from, made of (tokens, id, seed).
ORDERS: dict[str, Callable[[np.ndarray, int, int], Order]] = {
    "stream": _stream,
    "sentences": ShuffledSentences,
}
