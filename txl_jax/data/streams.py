"""Contiguous streams over a token file, cut into segments (section 3.2).

A split of N tokens makes N - 1 pairs (input, target), each scored once: every token
but the very first. Stream b holds the pairs [b (N-1) / B, (b+1) (N-1) / B), so its
first input is the last token of stream b - 1 and lengths differ by at most one.

Dims: S segments in one call, B streams, L segment.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError


class Segment(NamedTuple):
    """S consecutive segments of B streams; inside a scan over S, one of them.

    weights_SBL is 1 where the target is scored; first_SBL marks the start of a
    document, which sees nothing before it; length_SB counts real tokens, padding
    standing at the right end only.
    """

    inputs_SBL: np.ndarray  # int32
    targets_SBL: np.ndarray  # int32
    weights_SBL: np.ndarray  # float32
    first_SBL: np.ndarray  # bool
    length_SB: np.ndarray  # int32


class Position(NamedTuple):
    """Where reading goes on: host data, saved with a checkpoint as JSON."""

    epoch: int = 0
    segment: int = 0  # segments read in this epoch
    token_offset: int = 0  # tokens read in this epoch from the longest stream


class Streams:
    """B streams over the tokens of one split; `batch` is a pure function.

    With `rows` only those streams are read: a process of several asks for its own.
    With `warm_tokens` a stream starts so many tokens early, not scored, to fill the
    memory with what precedes it (NVIDIA's protocol for evaluation).

    Raises UserError when the split is too short for B streams.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        tgt_len: int,
        segments: int = 1,
        *,
        rows: slice = slice(None),
        warm_tokens: int = 0,
    ):
        pairs = len(tokens) - 1
        if pairs < batch_size:
            raise UserError(
                f"{len(tokens)} tokens are too few for {batch_size} streams: each "
                "needs two at least; use fewer streams or a longer text"
            )
        self.tokens = tokens
        self.tgt_len = tgt_len
        self.segments = segments
        # Python integers: B x tokens passes 2^31 in the published runs.
        bounds = np.array([b * pairs // batch_size for b in range(batch_size + 1)])
        self.scored_from_B = bounds[:-1][rows]
        self.end_B = bounds[1:][rows]
        self.start_B = np.maximum(self.scored_from_B - warm_tokens, 0)
        longest = -(-pairs // batch_size) + (warm_tokens if batch_size > 1 else 0)
        self.segments_per_epoch = -(-min(longest, pairs) // tgt_len)

    def _segment(self, token_offset: int) -> tuple[np.ndarray, ...]:
        at_B = self.start_B + token_offset
        length_B = np.clip(self.end_B - at_B, 0, self.tgt_len)
        position_BL = at_B[:, None] + np.arange(self.tgt_len)
        real_BL = position_BL < self.end_B[:, None]
        position_BL = np.where(real_BL, position_BL, 0)
        scored_BL = real_BL & (position_BL >= self.scored_from_B[:, None])
        first_BL = np.zeros(position_BL.shape, bool)
        # An epoch begins without a memory of the end of the one before.
        first_BL[:, 0] = token_offset == 0
        return (
            self.tokens[position_BL].astype(np.int32),
            self.tokens[position_BL + 1].astype(np.int32),
            scored_BL.astype(np.float32),
            first_BL,
            length_B.astype(np.int32),
        )

    def _after(self, position: Position) -> Position:
        epoch, segment, token_offset = position
        if segment + 1 == self.segments_per_epoch:
            return Position(epoch + 1)
        return Position(epoch, segment + 1, token_offset + self.tgt_len)

    def cold_tokens(self, mem_len: int) -> int:
        """Returns how many tokens are scored before their stream has read mem_len."""
        warm_B = self.scored_from_B - self.start_B
        cold_B = np.minimum(mem_len - warm_B, self.end_B - self.scored_from_B)
        return int(np.maximum(cold_B, 0).sum())

    def batch(self, position: Position) -> tuple[Segment, Position]:
        """Returns the next S segments, on into the next epoch, and where to go on."""
        parts = []
        for _ in range(self.segments):
            parts.append(self._segment(position.token_offset))
            position = self._after(position)
        arrays = (np.stack(part) for part in zip(*parts, strict=True))
        return Segment(*arrays), position

    def epoch(self) -> Iterator[Segment]:
        """Yields every segment of the split once, one at a time (S = 1)."""
        for segment in range(self.segments_per_epoch):
            parts = self._segment(segment * self.tgt_len)
            yield Segment(*(part[None] for part in parts))
