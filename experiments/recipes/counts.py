"""Predictions of bytes by counts of those that followed the same context before.

Contexts are the last 0 to K bytes (prediction by partial matching, Cleary and Witten
1984), the current word, alone and with the previous word or the start of the line, and
the longest match. Each falls back on a shorter one with a learned probability.

Dims: B streams of text, X predictions (the first is uniform), V bytes.
"""

import math
import re

import numpy as np

V, K, M = 256, 6, 7  # K: the longest context; M: the bytes with which a match begins
BELOW = -1, 0, 1, 2, 3, 4, 5, 6, 4, 8, 8, 7  # the prediction that each falls back on
LIMIT = 1 << 22  # contexts, and places of matches: an estimated 3 GB
DECAY, DISCOUNT = 0.98, 0.4  # of counts
EXCLUDED = 0.1  # counted for a byte that a longer context had seen
Match = tuple[bytearray, int, int]  # a text, the place of its next byte, length
Cell = tuple[int, int, int]  # context, number of its bytes, half octaves of their sum


def find_contexts(text: bytearray) -> list[bytes]:
    """Returns the contexts of a text's next byte, without the match."""
    tail, line = bytes(text[-40:]).rjust(40), text.rfind(b"\n", -4096) + 1
    *_, before, word = b"", *re.split(rb"[^a-z\x80-\xff]+", tail.lower())
    contexts = [tail[40 - k :] for k in range(K + 1)]
    contexts += [word or tail[-1:], before + b" " + word]
    contexts.append(bytes(text[line : line + 2]) + b" " + word)
    return [bytes([x]) + context for x, context in enumerate(contexts)]


class Counts:
    """Predicts the next byte of each stream by counts that are common to them.

    New contexts and places of matches are ignored after the first LIMIT ones.
    """

    def __init__(self, B: int) -> None:
        self.text_B = [bytearray() for _ in range(B)]
        self.p_BXV = np.full((B, len(BELOW), V), 1 / V)
        self.contexts_B: list[list[bytes]] = [[]] * B
        self.cells_B: list[dict[Cell, float]] = [{}] * B  # used, with their escapes
        self.match_B: list[Match | None] = [None] * B
        self.counts: dict[bytes, dict[int, float]] = {}
        self.places: dict[bytes, Match] = {}  # of M bytes, and what followed
        self.escapes: dict[Cell, float] = {}  # the probabilities of falling back

    def predict(self, byte_B: np.ndarray) -> np.ndarray:
        """Counts a byte of each stream; returns log_p_BXV of their next ones."""
        for b, byte in enumerate(byte_B.tolist()):
            self.learn(b, byte)
        for b, text in enumerate(self.text_B):
            self.contexts_B[b], self.cells_B[b] = find_contexts(text), {}
            counted = [self.counts.get(each, {}) for each in self.contexts_B[b]]
            self.match_B[b] = self.match_B[b] or self.places.get(bytes(text[-M:]))
            other, place, length = self.match_B[b] or (bytearray(), 0, 0)
            counted.append({byte: length for byte in other[place : place + 1]})
            self.combine(b, counted)
        return np.log(self.p_BXV[:, 1:])

    def combine(self, b: int, counted: list[dict[int, float]]) -> None:
        """Fills p_XV of a stream with the predictions of counts by byte."""
        p_XV = self.p_BXV[b]
        for x, counts in enumerate(counted, 1):
            p_XV[x] = p_XV[BELOW[x]]
            if counts:
                octaves = math.frexp((1 + sum(counts.values())) ** 2)[1]
                cell = x, min(len(counts), 15), min(octaves, 12)
                escape = self.cells_B[b][cell] = self.escapes.get(cell, 0.5)
                seen_N = np.fromiter(counts.values(), float) - DISCOUNT
                seen_N = np.maximum(seen_N, 0.02)
                p_XV[x] *= escape
                p_XV[x, list(counts)] += (1 - escape) / seen_N.sum() * seen_N

    def learn(self, b: int, byte: int) -> None:
        """Counts the byte of a stream that was predicted."""
        text, p_X = self.text_B[b], self.p_BXV[b, :, byte].tolist()
        for cell, escape in self.cells_B[b].items():
            share = escape * p_X[BELOW[cell[0]]] / p_X[cell[0]]
            now = self.escapes.get(cell, 0.5)
            self.escapes[cell] = max(now + 0.005 * (share - now), 1e-9)
        if match := self.match_B[b]:
            other, place, length = match
            hits = other[place] == byte
            self.match_B[b] = (other, place + 1, length + 1) if hits else None
        gain = 1.0
        for k, context in reversed([*enumerate(self.contexts_B[b])]):
            gain = gain if k < K else 1.0  # words exclude nothing
            if len(self.counts) < LIMIT:
                self.counts.setdefault(context, {})
            counts = self.counts.get(context, {})
            is_seen = byte in counts
            if gain == 1:
                counts |= {seen: DECAY * n for seen, n in counts.items()}
            counts[byte] = counts.get(byte, 0.0) + gain
            gain = EXCLUDED if is_seen else gain
        if len(text) >= M and len(self.places) < LIMIT:
            self.places[bytes(text[-M:])] = text, len(text), 1
        text.append(byte)
