"""Reading ahead changes neither what is read nor how a run ends."""

import subprocess
import sys
import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest

from txl_jax.data.prefetch import Prefetch
from txl_jax.data.streams import Position, Segment, Streams
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, place_segments


def count(position: int) -> tuple[str, int]:
    return f"batch {position}", position + 1


def wait_until(condition: threading.Event) -> None:
    assert condition.wait(10)


def make_streams() -> Streams:
    text = np.arange(2_001, dtype=np.int32)
    return Streams(text, 8, 16, 2, roll=True, varlen=True, seed=1)


def assert_same(got: Segment, expected: Segment) -> None:
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_it_reads_what_the_function_makes_from_any_position() -> None:
    streams, position = make_streams(), Position()
    saved = []
    with closing(Prefetch(streams.batch, position)) as ahead:
        for _ in range(20):
            expected, position = streams.batch(position)
            got, after = next(ahead)
            assert_same(got, expected)
            assert after == position
            saved.append(after)
    assert position.epoch > 1
    for at in saved[::7]:
        with closing(Prefetch(make_streams().batch, at)) as ahead:
            got, after = next(ahead)
        expected, same = streams.batch(at)
        assert_same(got, expected)
        assert after == same


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_is_ahead_by_its_depth_and_no_more(depth: int) -> None:
    made: list[int] = []
    full = threading.Event()

    def make(position: int) -> tuple[str, int]:
        made.append(position)
        if len(made) == depth + 3:
            full.set()
        return count(position)

    with closing(Prefetch(make, 0, depth)) as ahead:
        assert [next(ahead) for _ in range(3)] == [count(n) for n in range(3)]
        wait_until(full)
        time.sleep(0.05)
        assert made == list(range(depth + 3))


def test_it_works_while_the_loop_does() -> None:
    second = threading.Event()

    def make(position: int) -> tuple[str, int]:
        if position == 1:
            second.set()
        return count(position)

    with closing(Prefetch(make, 0)) as ahead:
        next(ahead)
        wait_until(second)  # made though nobody has asked for it


def test_an_exception_comes_out_after_the_batches_before_it() -> None:
    def make(position: int) -> tuple[str, int]:
        if position == 2:
            raise OSError("the disk is gone")
        return count(position)

    with closing(Prefetch(make, 0)) as ahead:
        assert [next(ahead), next(ahead)] == [count(0), count(1)]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(ahead)
    assert not ahead.thread.is_alive()


def test_an_exception_in_the_loop_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt), closing(Prefetch(count, 0)) as ahead:
        next(ahead)
        raise KeyboardInterrupt
    assert not ahead.thread.is_alive()
    assert list(ahead) == [], "closed: nothing comes any more"


def test_closing_waits_for_the_batch_in_work() -> None:
    began, go_on = threading.Event(), threading.Event()

    def make(position: int) -> tuple[str, int]:
        began.set()
        wait_until(go_on)
        return count(position)

    ahead = Prefetch(make, 0)
    wait_until(began)
    threading.Timer(0.05, go_on.set).start()
    ahead.close()
    ahead.close()
    assert not ahead.thread.is_alive()


@pytest.mark.parametrize("last_words", ["", "raise SystemExit(3)"])
def test_a_process_ends_though_nobody_closes(last_words: str) -> None:
    program = f"""
from txl_jax.data.prefetch import Prefetch
ahead = Prefetch(lambda n: (n, n + 1), 0)
assert next(ahead) == (0, 1)
{last_words}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == (3 if last_words else 0)


def test_it_works_under_the_transfer_guard() -> None:
    mesh = make_mesh(MeshConfig())
    streams = make_streams()
    expected, _ = streams.batch(Position())
    with (
        closing(Prefetch(streams.batch, Position())) as ahead,
        jax.transfer_guard("disallow"),
    ):
        segment, _ = next(ahead)
        placed = place_segments(mesh, segment)
    assert_same(jax.device_get(placed), expected)
