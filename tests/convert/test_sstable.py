"""The checksum equals published values and the definition, at every length."""

import numpy as np
import pytest

from tests.convert import bundles
from txl_jax.convert import sstable


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert sstable.crc32c(data) == expected


def test_every_short_length() -> None:
    data = np.random.default_rng(0).bytes(300)
    for size in range(len(data)):
        assert sstable.crc32c(data[:size]) == bundles.crc32c(data[:size]), size


def test_lengths_around_the_widest_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sstable, "WIDEST", 3)
    data = np.random.default_rng(1).bytes(140)
    for size in range(len(data)):
        assert sstable.crc32c(data[:size]) == bundles.crc32c(data[:size]), size


def test_folds_of_the_widest_size() -> None:
    # A message and its checksum leave the same register whatever the message is.
    for size in (1 << 18, (3 << 18) - 4, (2 << 18) + 1):
        data = np.random.default_rng(size).bytes(size)
        own = sstable.crc32c(data).to_bytes(4, "little")
        assert sstable.crc32c(data + own) == 0x48674BC7


def test_masked() -> None:
    for data in (b"", b"a", b"123456789"):
        assert sstable.masked_crc32c(data) == bundles.masked(data)
