"""Contiguous streams over a token file, cut into segments (section 3.2).

A split of N tokens makes N - 1 pairs (input, target): every token but the very first is
a target. Each is read once in an epoch, and scored unless an option excludes it. Stream
b holds the pairs [b (N-1) / B, (b+1) (N-1) / B), so its first input is the last token
of stream b - 1 and lengths differ by at most one.

An epoch's text is the file, or a permutation of its sentences (One Billion Word):
nothing is dropped, no token is copied, and any position can be read directly.

Dims: S segments in one call, B streams, L segment, n sentences.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from txl_jax.data.options import SLACK
from txl_jax.errors import UserError
from txl_jax.model.segment import Segment

OFF = -1  # the id of no token
SHORTEST = 5  # tokens of a segment of varying length; at most tgt_len + SLACK
CHUNK_ELEMENTS = 2**22  # of the file or of a permutation, processed at once
Bits = TypeVar("Bits", int, np.ndarray)  # 64 bits; arrays are uint64
# Purposes of `random_bits`, with independent numbers.
ROTATION, LENGTH, SHUFFLE = 1, 2, 3


class Position(NamedTuple):
    """The place where reading continues: host data, saved in checkpoints as JSON."""

    epoch: int = 0
    segment: int = 0  # segments read in this epoch
    token_offset: int = 0  # tokens read in this epoch from the longest stream


def check_length(tokens: np.ndarray, batch_size: int, field: str) -> None:
    """Raises UserError if a text has too few tokens for the streams of a field."""
    if len(tokens) - 1 < batch_size:
        raise UserError(
            f"{len(tokens)} tokens are too few for {batch_size} streams: decrease "
            f"{field}, or use a longer text"
        )


@dataclass(eq=False)
class Streams:
    """B streams over the tokens of one split; `batch` is a pure function.

    Random choices depend on (seed, epoch) and the number of the stream or segment, not
    on rows or on earlier batches.
    """

    tokens: np.ndarray
    batch_size: int
    tgt_len: int
    _: KW_ONLY
    # The streams that this process reads, in a run of several processes.
    rows: slice | np.ndarray = dataclasses.field(default_factory=lambda: slice(None))
    # Each segment starts with the last ext_len tokens of its stream, or fewer at the
    # start, as unscored context of a model without memory, in arrays wider by ext_len.
    ext_len: int = 0
    # A stream starts with this many earlier, unscored tokens, which fill the memory
    # (NVIDIA's evaluation). With ext_len they are the context of its first segments and
    # form no segments.
    warm_tokens: int = 0
    # Each input of this id starts a document and sees nothing before it. As a target,
    # the token is still the last one of the document that it ends.
    reset_memory_at: int = OFF
    # In every epoch, each stream starts at a random place and wraps around at its end,
    # where a document starts (NVIDIA's roll).
    roll: bool = False
    varlen: bool = False  # segments of varying length, in arrays wider by SLACK
    half_loss: bool = False  # a segment's first half is not scored (Table 6)
    score_from: int = 0  # targets with lower ids are not scored
    seed: int = 0
    sentence_end: int = OFF  # sentences, which end with this id, are shuffled
    field: str = "eval.streams"  # the config's name of batch_size, for errors

    def __post_init__(self) -> None:
        check_length(self.tokens, self.batch_size, self.field)
        self.shuffled: ShuffledSentences | None = None
        if self.sentence_end != OFF:
            self.shuffled = ShuffledSentences(self.tokens, self.sentence_end, self.seed)
        pairs, batch_size = len(self.tokens) - 1, self.batch_size
        self.tokens = np.asarray(self.tokens)  # indexing a np.memmap itself is slower
        # Python integers: B x tokens exceeds 2^31 in the published runs.
        bounds = np.array([b * pairs // batch_size for b in range(batch_size + 1)])
        # For each row: its stream, and the places in the split where its pairs begin to
        # be scored, end, start, and begin to form segments.
        self.stream_B = np.arange(batch_size, dtype=np.uint64)[self.rows]
        self.scored_from_B = bounds[:-1][self.rows]
        self.end_B = bounds[1:][self.rows]
        self.start_B = np.maximum(self.scored_from_B - self.warm_tokens, 0)
        # With ext_len, the tokens before scored_from_B are only context.
        self.new_from_B = self.scored_from_B if self.ext_len else self.start_B
        self.count_B = self.end_B - self.new_from_B
        longest = -(-pairs // batch_size) + (0 if self.ext_len else self.warm_tokens)
        self.longest = min(longest, pairs)

    @property
    def segments_per_epoch(self) -> int:
        """The number of segments in an epoch; with varlen, in the first epoch."""
        if not self.varlen:
            return -(-self.longest // self.tgt_len)
        count, position = 0, Position()
        while position.epoch == 0:
            count, position = count + 1, self._after(position)
        return count

    def length(self, position: Position) -> int:
        """Returns the number of tokens in a segment, unless its stream ends earlier.

        With varlen it is normal with mean tgt_len, or half of that in one segment of
        20, and deviation 5, from SHORTEST to tgt_len + SLACK, as in the original code.
        The normal number is the count of ones in 100 random bits, minus 50.
        """
        if not self.varlen:
            return self.tgt_len
        bits, other_bits = (
            random_bits(self.seed, LENGTH, position.epoch, 2 * position.segment + n)
            for n in (0, 1)
        )
        normal = bits.bit_count() + (other_bits >> 28).bit_count() - 50
        halved = other_bits % 2**28 < 2**28 // 20
        about = self.tgt_len // 2 if halved else self.tgt_len
        return min(max(about + normal, SHORTEST), self.tgt_len + SLACK)

    def _rotation_B(self, epoch: int) -> np.ndarray:
        """Returns the pair with which each stream starts an epoch."""
        if not self.roll:
            return np.zeros_like(self.count_B)
        random_B = random_bits(self.seed, ROTATION, epoch, self.stream_B)
        return (random_B % self.count_B.astype(np.uint64)).astype(np.int64)

    def _segment(self, position: Position) -> Segment:
        """Returns the segment at a position, with S = 1."""
        offset = position.token_offset
        slack = SLACK if self.varlen else 0
        width_L = np.arange(self.ext_len + self.tgt_len + slack)
        new_B = np.clip(self.count_B - offset, 0, self.length(position))
        # Earlier tokens before a stream's first pair; in training there are none.
        lead_B = self.new_from_B - self.start_B
        context_B = np.minimum(self.ext_len, lead_B + offset)
        length_B = np.where(new_B > 0, context_B + new_B, 0)
        real_BL = width_L < length_B[:, None]
        # The n-th new pair of the epoch is turn n; the context before turn 0 has
        # turns below 0. Rotated, a stream wraps from its end to its beginning;
        # otherwise a turn is an index.
        turn_BL = offset - context_B[:, None] + width_L
        index_BL = turn_BL + self._rotation_B(position.epoch)[:, None]
        count_B1 = self.count_B[:, None]
        wraps_BL = index_BL == count_B1
        index_BL = np.where(index_BL < count_B1, index_BL, index_BL - count_B1)
        pair_BL = np.where(real_BL, self.new_from_B[:, None] + index_BL, 0)
        scored_BL = real_BL & (turn_BL >= offset)
        scored_BL &= pair_BL >= self.scored_from_B[:, None]
        if self.half_loss:
            scored_BL &= width_L >= length_B[:, None] // 2
        targets_BL = self._read(position.epoch, pair_BL + 1)
        scored_BL &= targets_BL >= self.score_from
        # The memory is reset at an epoch's start and where a stream wraps, because its
        # tokens do not precede the segment in the text.
        starts_BL = turn_BL == -lead_B[:, None]
        inputs_BL = self._read(position.epoch, pair_BL)
        first_BL = wraps_BL | starts_BL
        if self.reset_memory_at != OFF:
            first_BL |= inputs_BL == self.reset_memory_at
        return Segment(
            inputs_SBL=inputs_BL[None],
            targets_SBL=targets_BL[None],
            weights_SBL=scored_BL[None].astype(np.float32),
            first_SBL=(real_BL & first_BL)[None],
            length_SB=length_B[None].astype(np.int32),
        )

    def _read(self, epoch: int, index_BL: np.ndarray) -> np.ndarray:
        if self.shuffled:
            index_BL = self.shuffled.locate(epoch, index_BL)
        return self.tokens[index_BL].astype(np.int32)

    def _after(self, position: Position) -> Position:
        epoch, segment, token_offset = position
        token_offset += self.length(position)
        if token_offset >= self.longest:
            return Position(epoch + 1)
        return Position(epoch, segment + 1, token_offset)

    def cold_tokens(self, full: int) -> int:
        """Returns the number of tokens scored before their stream has read `full`.

        `full` is the memory's length, or ext_len without memory: the counted tokens
        have a shorter context than the others.
        """
        warm_B = self.scored_from_B - self.start_B
        cold_B = np.minimum(full - warm_B, self.end_B - self.scored_from_B)
        return int(np.maximum(cold_B, 0).sum())

    def batch(self, position: Position, S: int = 1) -> tuple[Segment, Position]:
        """Returns the next S segments, across epochs, and the position after them."""
        parts = []
        for _ in range(S):
            parts.append(self._segment(position))
            position = self._after(position)
        fields = zip(*parts, strict=True)
        return Segment._make(map(np.concatenate, fields)), position

    def epoch(self) -> Iterator[Segment]:
        """Yields every segment of the split once, with S = 1."""
        position = Position()
        while position.epoch == 0:
            segment, position = self.batch(position)
            yield segment


def splitmix64(z: Bits) -> Bits:
    """Returns SplitMix64's output for a state, an int or an array of uint64."""
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def random_bits(seed: int, purpose: int, epoch: int, index: Bits) -> Bits:
    """Returns 64 random bits for an index, an int or an array of uint64.

    They are number `index`, from 0, of a sequence of SplitMix64 (Steele, Lea and Flood,
    2014), whose initial state is a hash of the other arguments. Integer arithmetic does
    not depend on a library's version.
    """
    state = splitmix64(splitmix64(splitmix64(seed) ^ purpose) ^ epoch)
    return splitmix64((index * 0x9E3779B97F4A7C15 + state) & (2**64 - 1))


def find_sentences(tokens: np.ndarray, sentence_end: int) -> np.ndarray:
    """Returns the start of each sentence, and N at the end: int64 [n + 1].

    A sentence ends with the token sentence_end. If all sentences also start with it
    (`<S> words <S>`, TensorFlow's lm1b), they are cut between the two. Text after the
    last end is also a sentence.
    """
    tokens = np.asarray(tokens)
    ends = np.concatenate(
        [
            np.flatnonzero(tokens[at : at + CHUNK_ELEMENTS] == sentence_end) + (at + 1)
            for at in range(0, len(tokens), CHUNK_ELEMENTS)
        ]
    )
    if not len(ends):
        raise UserError(
            'train.order = "sentences" needs lines, and the text has none: set it to '
            '"stream"'
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
    for at in range(0, n, CHUNK_ELEMENTS):
        number = np.arange(at, min(at + CHUNK_ELEMENTS, n), dtype=np.uint64)
        bits = random_bits(seed, SHUFFLE, epoch, number)
        keys[at : at + CHUNK_ELEMENTS] = bits & (2**64 - 1 - low) | number
    keys.sort()
    keys &= low
    return keys.astype(np.min_scalar_type(n))


class ShuffledSentences:
    """The text of each epoch, with its sentences in another order.

    It needs 8 bytes per sentence, and 12 more for the permutation of the latest epoch.
    """

    def __init__(self, tokens: np.ndarray, sentence_end: int, seed: int):
        """Reads the whole file."""
        self.starts = find_sentences(tokens, sentence_end)
        self.seed = seed
        self.epoch = -1

    def _make(self, epoch: int) -> None:
        self.epoch = -1
        self.sentence = self.ends = np.empty(0, int)  # frees memory for the next epoch
        self.sentence = permute(len(self.starts) - 1, self.seed, epoch)
        # ends[k] is the end of sentence k in the epoch's text.
        self.ends = np.diff(self.starts)[self.sentence]
        np.cumsum(self.ends, out=self.ends)
        self.epoch = epoch

    def locate(self, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns indices in the token file from indices in the epoch's text."""
        if epoch != self.epoch:
            self._make(epoch)
        k = np.searchsorted(self.ends, index, side="right")
        return index - self.ends[k] + self.starts[self.sentence[k] + 1]
