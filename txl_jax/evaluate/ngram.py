"""Yardsticks for a byte-level model: n-grams and compressors, in bits per byte.

A model of bytes that does not beat these has not learned from context. The paper has
none of this; its figures on enwik8 are in the same unit.

Dims: none.
"""

import gzip
import lzma

import numpy as np

MAX_ORDER = 7  # context and symbol together fill one 64-bit key


def witten_bell_bits(train: np.ndarray, test: np.ndarray, order: int) -> float:
    """Returns bits per byte of an order-`order` model of `train` on `test`.

    Every byte of `test` but its very first is scored, as in the rest of this package.
    """
    return float(-np.log2(witten_bell(train, test, order)).mean())


def witten_bell(train: np.ndarray, test: np.ndarray, order: int) -> np.ndarray:
    """Returns the probability of each byte of `test` but its first.

    Interpolated Witten-Bell: with c(h w) the count of byte w after context h in
    `train`, c(h) their sum and T(h) the number of different w,

        P(w | h) = (c(h w) + T(h) P(w | h without its oldest byte)) / (c(h) + T(h))

    from the uniform 1/256 up to `order` bytes of context; a context that `train` lacks
    adds nothing. The first bytes of `test` have the context that there is.
    """
    if not 0 <= order <= MAX_ORDER:
        raise ValueError(f"order={order} is not in [0, {MAX_ORDER}]")
    if len(test) < 2:
        raise ValueError(f"test has {len(test)} bytes: nothing is scored below 2")
    probability = np.full(len(test) - 1, 1 / 256)
    for length in range(order + 1):
        first = max(length, 1)  # the first byte of test with that much context
        seen, total, types = _count(train, test, length, first)
        known = total > 0
        lower = probability[first - 1 :]
        lower[known] = (seen + types * lower)[known] / (total + types)[known]
    return probability


def _count(
    train: np.ndarray, test: np.ndarray, length: int, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns c(h w), c(h) and T(h) for the bytes of `test` from `first` on."""
    grams, counts = np.unique(_keys(train, length + 1), return_counts=True)
    wanted = _keys(test, length + 1)[first - length :]
    if not len(grams):
        nothing = np.zeros(len(wanted), np.int64)
        return nothing, nothing, nothing
    contexts = grams >> 8
    starts = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
    totals = np.add.reduceat(counts, starts)
    types = np.diff(np.r_[starts, len(grams)])
    contexts = contexts[starts]
    gram, has_gram = _look_up(grams, wanted)
    context, has_context = _look_up(contexts, wanted >> 8)
    return (
        np.where(has_gram, counts[gram], 0),
        np.where(has_context, totals[context], 0),
        np.where(has_context, types[context], 0),
    )


def _keys(data: np.ndarray, length: int) -> np.ndarray:
    """Returns every run of `length` bytes as one integer, the newest byte lowest."""
    dtype = np.uint32 if length <= 4 else np.uint64
    count = max(len(data) - length + 1, 0)
    keys: np.ndarray = np.zeros(count, dtype)
    for offset in range(length):
        keys <<= 8
        keys |= data[offset : offset + count]
    return keys


def _look_up(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where `keys` are in a sorted table, and whether they are there at all."""
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return index, table[index] == keys


def compressed_bits(data: bytes) -> dict[str, float]:
    """Returns bits per byte of `gzip -9` and `xz -9`, which see only `data` itself."""
    sizes = {
        "gzip -9": len(gzip.compress(data, compresslevel=9, mtime=0)),
        "xz -9": len(lzma.compress(data, preset=9)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def yardsticks(train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Returns bits per byte on test of what a model is to beat, by name.

    The n-gram models learn from train; gzip and xz adapt on the test bytes themselves.
    """
    orders = {
        f"order-{order}": witten_bell_bits(train, test, order) for order in (2, 3)
    }
    return orders | compressed_bits(test.tobytes())
