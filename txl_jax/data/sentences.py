"""Shuffled sentences, in a new order every epoch (One Billion Word).

An epoch's text is a seeded permutation of all sentences. Nothing is dropped, no token
is copied, and any position of any epoch can be read directly.

Dims: n sentences in a token file of N tokens.
"""

import numpy as np

from txl_jax.data.random_bits import SHUFFLE, draw
from txl_jax.errors import UserError

# Elements of the file or of the permutation that are processed at once.
CHUNK = 2**22


def find_sentences(tokens: np.ndarray, sentence_end: int) -> np.ndarray:
    """Returns the start of each sentence, and N at the end: int64 [n + 1].

    A sentence ends with the token sentence_end. If all sentences also start with it
    (`<S> words <S>`, TensorFlow's lm1b), they are cut between the two. The text after
    the last one is also a sentence.
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
            f'train.order = "sentences:{sentence_end}": token {sentence_end} does not '
            "occur in the text: give the id of the token that ends a sentence, or set "
            'train.order = "stream"'
        )
    if ends[0] == 1 and len(ends) % 2 == 0 and (ends[1:-1:2] + 1 == ends[2::2]).all():
        ends = ends[1::2]
    rest = [len(tokens)] if ends[-1] < len(tokens) else []
    return np.concatenate([[0], ends, rest]).astype(np.int64)


def permute(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of n numbers, in the smallest unsigned type.

    It sorts random bits whose lowest bits are the number itself: no two are equal, so
    every sorting algorithm has the same result.
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
    """An `Order` that permutes the sentences in each epoch.

    It needs 8 bytes per sentence, and 12 more for the permutation of the latest epoch.
    """

    def __init__(self, tokens: np.ndarray, sentence_end: int, seed: int):
        """Reads the whole file."""
        self.start = find_sentences(tokens, sentence_end)
        self.seed = seed
        self.epoch = -1

    def _make(self, epoch: int) -> None:
        self.epoch = -1
        self.sentence = self.end = np.empty(0, int)  # frees memory for the next epoch
        self.sentence = permute(len(self.start) - 1, self.seed, epoch)
        # end[k] is the end of sentence k in the epoch's text.
        self.end = np.diff(self.start)[self.sentence]
        np.cumsum(self.end, out=self.end)
        self.epoch = epoch

    def __call__(self, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns indices in the token file from indices in the epoch's text."""
        if epoch != self.epoch:
            self._make(epoch)
        k = np.searchsorted(self.end, index, side="right")
        return index - self.end[k] + self.start[self.sentence[k] + 1]
