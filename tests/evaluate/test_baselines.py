"""N-gram models match their recursion, and compressors are measured in bits."""

import math
from collections import Counter

import numpy as np
import pytest

from txl_jax.evaluate.baselines import measure, witten_bell

FLOAT64_TOLERANCE = 1e-12


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def slow_witten_bell(train: bytes, context: bytes, symbol: int, order: int) -> float:
    """The recursion of `witten_bell`'s docstring, one byte at a time."""
    probability = 1 / 256
    for length in range(min(order, len(context)) + 1):
        recent = context[len(context) - length :]
        after: Counter[int] = Counter()
        for at in range(length, len(train)):
            if train[at - length : at] == recent:
                after[train[at]] += 1
        if total := sum(after.values()):
            types = len(after)
            probability = (after[symbol] + types * probability) / (total + types)
    return probability


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 7])
def test_agrees_with_the_slow_recursion(order: int) -> None:
    rng = np.random.default_rng(order)
    train = rng.choice(as_array(b"abc\n\xff"), 150, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    test = rng.choice(as_array(b"abc\x00\xff"), 60, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    data = test.tobytes()
    expected = [
        slow_witten_bell(train.tobytes(), data[:at], data[at], order)
        for at in range(1, len(data))
    ]
    actual = witten_bell(train, test, order)
    np.testing.assert_allclose(actual, expected, rtol=FLOAT64_TOLERANCE)
    if order in (2, 3):
        bits = -sum(map(math.log2, expected)) / len(expected)
        assert measure(train, test)[f"order-{order}"] == pytest.approx(bits, rel=1e-12)


def test_compressors_are_measured_in_bits_per_byte() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    text = as_array(b"to be or not to be\n" * 2000)
    bits, more = measure(text, text), measure(text, noise)
    for name in ("gzip -9", "xz -9"):
        assert 8 < more[name] < 8.1 and bits[name] < 0.1
