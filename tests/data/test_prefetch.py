"""Prefetching changes neither the batches nor how a run ends."""

import threading
from contextlib import closing
from functools import partial

import pytest

from tests.data.reading import assert_same, positions
from tests.support.processes import LIMIT_SECONDS
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import Position, Streams


def count(position: int) -> tuple[str, int]:
    return f"batch {position}", position + 1


def make_streams() -> Streams:
    return Streams(positions(2_001), 8, 16, roll=True, varlen=True, seed=1)


def test_batches_match_the_function_from_any_position() -> None:
    streams, position = make_streams(), Position()
    for _ in range(3):
        with closing(prefetch(partial(make_streams().batch, S=2), position)) as ahead:
            for _ in range(7):
                expected, position = streams.batch(position, 2)
                batch, after = next(ahead)
                assert_same(batch, expected)
                assert after == position
    assert position.epoch > 1


@pytest.mark.parametrize("depth", [1, 5])
def test_at_most_depth_batches_are_made_ahead(depth: int) -> None:
    made: list[int] = []

    def make(position: int) -> tuple[str, int]:
        made.append(position)
        return count(position)

    with closing(prefetch(make, 0, depth)) as ahead:
        for n, batch in zip(range(1000), ahead, strict=False):
            assert batch == count(n) and len(made) <= n + 1 + depth


def test_an_exception_is_raised_after_the_batches_before_it() -> None:
    def make(position: int) -> tuple[str, int]:
        if position == 2:
            raise OSError("the disk is gone")
        return count(position)

    with closing(prefetch(make, 0)) as ahead:
        assert [next(ahead), next(ahead)] == [count(0), count(1)]
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)


def test_closing_ends_the_thread() -> None:
    threads = set(threading.enumerate())
    ahead = prefetch(count, 0)
    assert next(ahead) == count(0)
    (thread,) = set(threading.enumerate()) - threads
    assert thread.daemon, "an unclosed prefetch does not keep its process alive"
    ahead.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive() and list(ahead) == []
