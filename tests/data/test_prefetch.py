"""Reading ahead changes neither the batches nor how a run ends."""

import threading
import time
from contextlib import closing

import pytest

from tests.data.reading import assert_same, positions
from txl_jax.data.prefetch import prefetch
from txl_jax.data.streams import Position, Streams


def count(position: int) -> tuple[str, int]:
    return f"batch {position}", position + 1


def make_streams() -> Streams:
    return Streams(positions(2_001), 8, 16, 2, roll=True, varlen=True, seed=1)


def test_batches_are_those_of_the_function_from_any_position() -> None:
    streams, position = make_streams(), Position()
    for _ in range(3):
        with closing(prefetch(make_streams().batch, position)) as ahead:
            for _ in range(7):
                expected, position = streams.batch(position)
                batch, after = next(ahead)
                assert_same(batch, expected)
                assert after == position
    assert position.epoch > 1


@pytest.mark.parametrize("depth", [1, 5])
def test_it_is_ahead_by_its_depth_and_no_more(depth: int) -> None:
    made: list[int] = []
    full = threading.Event()

    def make(position: int) -> tuple[str, int]:
        made.append(position)
        if len(made) == depth + 3:
            full.set()
        return count(position)

    with closing(prefetch(make, 0, depth)) as ahead:
        assert [next(ahead) for _ in range(3)] == [count(n) for n in range(3)]
        assert full.wait(10)  # made while nobody waits for them
        time.sleep(0.05)
        assert made == list(range(depth + 3))


def test_an_exception_comes_out_after_the_batches_before_it() -> None:
    def make(position: int) -> tuple[str, int]:
        if position == 2:
            raise OSError("the disk is gone")
        return count(position)

    with closing(prefetch(make, 0)) as ahead:
        assert [next(ahead), next(ahead)] == [count(0), count(1)]
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)


def test_closing_waits_for_the_current_batch() -> None:
    threads = set(threading.enumerate())
    began, go_on = threading.Event(), threading.Event()

    def make(position: int) -> tuple[str, int]:
        if position:
            began.set()
            assert go_on.wait(10)
        return count(position)

    ahead = prefetch(make, 0)
    assert next(ahead) == count(0) and began.wait(10)
    (thread,) = set(threading.enumerate()) - threads
    assert thread.daemon, "a process ends without close"
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    ahead.close()
    assert not thread.is_alive() and list(ahead) == []
    timer.join()
