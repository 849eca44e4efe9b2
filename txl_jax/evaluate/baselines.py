"""Baselines for byte-level models: n-gram models and compressors, in bits per byte.

A model that does not beat them has not learned to use context. The paper has no such
baselines; its enwik8 results have the same unit.
"""

import gzip
import lzma

import numpy as np


def witten_bell(train: np.ndarray, test: np.ndarray, order: int) -> np.ndarray:
    """Returns the probability of each byte of `test` except the first.

    Interpolated Witten-Bell: with c(h w) the count of byte w after context h in
    `train`, c(h) their sum and T(h) the number of different w,

        P(w | h) = (c(h w) + T(h) P(w | h without its oldest byte)) / (c(h) + T(h))

    starting from the uniform 1/256, up to `order` bytes of context, at most 7: context
    and symbol together fit a 64-bit key. Contexts that do not occur in `train` are
    skipped. The first bytes of `test` have shorter contexts.
    """
    probability = np.full(len(test) - 1, 1 / 256)
    for length in range(order + 1):
        first = max(length, 1)  # the first byte of test with that much context
        wanted = _keys(test, length + 1)[first - length :]
        grams, counts = np.unique(_keys(train, length + 1), return_counts=True)
        until = np.cumsum(np.r_[0, counts])
        start, end = _find(grams, wanted)
        seen = until[end] - until[start]
        start, end = _find(grams >> 8, wanted >> 8)
        total, types = until[end] - until[start], end - start
        known = total > 0
        lower = probability[first - 1 :]
        lower[known] = (seen + types * lower)[known] / (total + types)[known]
    return probability


def _keys(data: np.ndarray, length: int) -> np.ndarray:
    """Returns every run of `length` bytes as an integer, the last byte lowest."""
    dtype = np.uint32 if length <= 4 else np.uint64
    count = max(len(data) - length + 1, 0)
    keys: np.ndarray = np.zeros(count, dtype)
    for offset in range(length):
        keys <<= 8
        keys |= data[offset : offset + count]
    return keys


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where in a sorted table the entries equal to each key start and end."""
    start, end = (np.searchsorted(table, keys, side) for side in ("left", "right"))
    return start, end


def measure(train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Returns the bits per byte of every baseline on `test`, by name.

    The n-gram models are fitted to `train`; gzip and xz see only `test`. As in
    evaluation, the n-gram models score every byte of `test` but the first.
    """
    data = test.tobytes()
    sizes = {
        "gzip -9": len(gzip.compress(data, compresslevel=9, mtime=0)),
        "xz -9": len(lzma.compress(data, preset=9)),
    }
    bits = {name: 8 * size / len(data) for name, size in sizes.items()}
    for order in (2, 3):
        probability = witten_bell(train, test, order)
        bits[f"order-{order}"] = float(-np.log2(probability).mean())
    return bits
