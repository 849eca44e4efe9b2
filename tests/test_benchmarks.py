"""The benchmarks time in turn, and refuse to report from a loaded machine."""

import pytest

from experiments.benchmarks import quiet
from experiments.benchmarks.quiet import LoadedError, Watch


def rates(*seen: float) -> dict[str, quiet.Rate]:
    """Returns a library whose product runs at one rate after the other."""
    remaining = iter(seen)
    return {"jax": lambda: next(remaining)}


def make_watch(*seen: float, force: bool = False, load: float = 0.5) -> Watch:
    return Watch(force, rates(*seen), lambda: load)


def test_a_slow_product_is_refused_once_a_better_one_was_seen() -> None:
    watch = make_watch(100, 81, 100, 79)
    with pytest.raises(LoadedError, match="79.0 and at 100.0 GFLOP/s"):
        watch.look()
    with pytest.raises(LoadedError, match="79.0 and at 100.0 GFLOP/s"):
        make_watch(79, 80, 100)


def test_force_goes_on_and_keeps_the_first_trouble() -> None:
    watch = make_watch(100, 100, 50, force=True, load=3.0)
    found = watch.describe()
    assert found["loaded"] and found["trouble"].startswith("the load average is 3.00")
    assert found["matmul_gflops"]["jax"] == {"best": 100, "worst": 50, "spread": 0.5}
    assert not make_watch(100, 90, 100, force=True).describe()["loaded"]


def test_programs_run_in_turn_with_a_look_before_each() -> None:
    calls = ""

    def note(name: str) -> float:
        nonlocal calls
        calls += name
        return 1.0

    watch = Watch(False, {"jax": lambda: note("|")}, lambda: 0.0)
    programs = {name: (lambda name=name: note(name)) for name in "ab"}
    timings = quiet.alternate(programs, 3, watch)
    assert calls == "|||" + "ab" + "|ab|ba|ab|"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_a_timing_leaves_the_first_call_out() -> None:
    found = quiet.Timing(7.0, [2.0, 1.0, 4.0]).describe(10)
    assert found["median_seconds"] == 2 and found["tokens_per_second"] == 5
    assert found["spread"] == 1.5 and found["compile_seconds"] == 5
