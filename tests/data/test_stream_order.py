"""Random rotations and lengths of segments.

The tokens here are their own positions, so that a segment shows where it was read.
"""

import numpy as np

from tests.data.reading import positions
from txl_jax.data.options import SLACK
from txl_jax.data.streams import LEAST, Position, Streams, draw, splitmix64


def test_draw_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 from state 1234567.
    state = 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64((state + n * gamma) % 2**64) for n in (1, 2, 3)] == known
    # What a run of any later version must draw too.
    assert draw(1111, 1, 2, 3) == int(draw(1111, 1, 2, np.array([3], np.uint64))[0])
    assert draw(1111, 1, 2, 3) == 16703943413597834143


def test_rotations_differ_by_seed_epoch_and_stream_and_come_again() -> None:
    def starts(seed: int, epoch: int) -> np.ndarray:
        streams = Streams(positions(80_001), 8, 16, roll=True, seed=seed)
        return streams.batch(Position(epoch))[0].inputs_SBL[0, :, 0]

    offsets = [starts(seed, epoch) for seed in (0, 1) for epoch in range(50)]
    offsets_EB = np.array(offsets) - np.arange(8) * 10_000
    assert len(np.unique(offsets_EB)) > 0.95 * offsets_EB.size
    assert offsets_EB.min() >= 0 and offsets_EB.max() < 10_000
    assert abs(offsets_EB.mean() - 5_000) < 4 * 10_000 / 12**0.5 / offsets_EB.size**0.5
    np.testing.assert_array_equal(starts(1, 7), offsets[57])


def test_lengths_are_as_in_the_original_code() -> None:
    streams = Streams(positions(2), 1, 150, varlen=True, seed=3)
    lengths = np.array([streams.length(Position(2, s)) for s in range(10_000)])
    assert lengths.min() >= LEAST and lengths.max() <= 150 + SLACK
    short = lengths < 115
    assert abs(short.mean() - 0.05) < 4 * (0.05 * 0.95 / 10_000) ** 0.5
    for part, about in ((lengths[short], 75), (lengths[~short], 150)):
        assert abs(part.mean() - about) < 4 * 5 / len(part) ** 0.5
        assert abs(part.std() - 5) < 0.5
    tiny = Streams(positions(2), 1, 8, varlen=True)
    drawn = {tiny.length(Position(0, s)) for s in range(2_000)}
    assert min(drawn) == LEAST and max(drawn) <= 8 + SLACK
    again = Streams(positions(2), 1, 150, varlen=True, seed=4)
    for other, epoch in ((streams, 3), (again, 2)):
        drawn = {other.length(Position(epoch, s)) for s in range(20)}
        assert drawn != set(lengths[:20].tolist()), "epochs and seeds differ"
