"""Kernels are compared with `xla`, timed, and the fastest right one is chosen."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from txl_jax.kernels import chunked, measure, xla
from txl_jax.kernels.measure import Trials, Workload, choose, describe
from txl_jax.kernels.operands import Kernel, Operands

SHAPE = Workload((2, 2, 5, 7, 4, 12), "float32", ("bias_HR",), 3, dropout=0.1, layers=1)


def is_off(operands: Operands) -> jax.Array:
    o_BLHA = xla.rel_attention(operands)
    return o_BLHA.at[1, 0, 0, 0].mul(1.5)


def one_distance_is_off(operands: Operands) -> jax.Array:
    r_RHA: Any = operands.position.r_RHA
    position = operands.position._replace(r_RHA=r_RHA.at[-2].set(r_RHA[-1]))
    return xla.rel_attention(operands._replace(position=position))


def has_wrong_gradient(operands: Operands) -> jax.Array:
    v = operands.v_BKHA
    v -= 0.1 * (v - jax.lax.stop_gradient(v))
    return xla.rel_attention(operands._replace(v_BKHA=v))


def does_not_compile(operands: Operands) -> jax.Array:
    raise NotImplementedError("a tile\nof this size")


def fails_as_it_runs(operands: Operands) -> jax.Array:
    def fail(o_BLHA: np.ndarray) -> np.ndarray:
        raise MemoryError

    o_BLHA = xla.rel_attention(operands)
    return jax.pure_callback(fail, o_BLHA, jax.lax.stop_gradient(o_BLHA)) + o_BLHA


def has_no_memory(operands: Operands) -> jax.Array:
    if operands.q_BLHA.shape[1] == SHAPE.sizes[2]:
        raise MemoryError
    return xla.rel_attention(operands)


def is_off_at_this_length(operands: Operands) -> jax.Array:
    is_tile = operands.q_BLHA.shape[1] != SHAPE.sizes[2]
    return xla.rel_attention(operands) if is_tile else is_off(operands)


@dataclasses.dataclass
class Clock:
    """Stands for `time`, and for a program that takes given seconds for each kernel.

    A call returns itself at once; the clock advances when a result is waited for.
    """

    seconds: dict[Kernel, list[float]]
    now = 0.0
    calls = 0
    kernel: Kernel | None = None

    def perf_counter(self) -> float:
        """Returns the time."""
        return self.now

    def lower(self, kernel: Kernel, operands: Operands, backward: bool) -> Any:
        """Lowers the program of a kernel."""
        assert operands.oldest_BL.tolist() == [[0, 0, 0, 3, 3]] * 2
        assert backward
        self.kernel = kernel
        return SimpleNamespace(compile=self.compile)

    def compile(self, options: Any) -> Callable[[Operands], list["Clock"]]:
        """Compiles it."""
        assert options == {"fast": True}
        self.calls = 0
        return self.run

    def run(self, operands: Operands) -> list["Clock"]:
        """Runs it."""
        self.calls += 1
        return [self]

    def block_until_ready(self) -> None:
        """Lasts as long as the calls since the last one."""
        assert self.kernel
        first, *rest = self.seconds[self.kernel]
        self.seconds[self.kernel] = rest or [first]
        self.now += first * self.calls
        self.calls = 0


OPTIONS: measure.Options = {"fast": True}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns a clock for the timing of kernels; they are compared for real."""
    clock = Clock({})
    time_kernel = measure.time_kernel

    def timed(*args: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(measure, "time", clock)
            patch.setattr(measure.check, "run_kernel", clock)
            return time_kernel(*args)

    monkeypatch.setattr(measure, "time_kernel", timed)
    return clock


def trials_of(names: Iterable[str]) -> Trials:
    return measure.measure(dict.fromkeys(names, SHAPE), OPTIONS)


def test_the_fastest_right_kernel_is_chosen(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    fakes = {
        "off": is_off,
        "length": is_off_at_this_length,
        "gradient": has_wrong_gradient,
        "error": does_not_compile,
        "fails": fails_as_it_runs,
        "slow": chunked.rel_attention,
        "xla": xla.rel_attention,
    }
    monkeypatch.setattr(measure, "KERNELS", measure.KERNELS | fakes)
    clock.seconds = {xla.rel_attention: [2e-3], chunked.rel_attention: [3e-3]}
    trials = trials_of(fakes)
    assert choose(trials) == "xla"
    # A call of 10 queries takes 2 and 3 ms.
    assert [*trials.values()][:2] == pytest.approx([200.0, 300.0])
    assert [*trials][:2] == ["xla", "slow"]
    assert str(trials["off"]).startswith("o is off by ")
    assert str(trials["length"]).startswith("o is off by ")
    assert str(trials["gradient"]).startswith("the gradient of v_BKHA is off by 10% ")
    assert trials["error"] == "NotImplementedError: a tile"
    assert str(trials["fails"]).startswith("JaxRuntimeError: ")
    line = describe(trials)
    assert line.startswith("xla 200 ms, slow 300 ms, fails excluded (JaxRuntimeErr")
    assert "error excluded (NotImplementedError: a tile), " in line
    assert line.endswith(" (a layer, 1,000 queries): takes xla")
    clock.seconds = {xla.rel_attention: [2e-3], chunked.rel_attention: [1e-3]}
    assert choose(trials_of(["xla", "slow"])) == "slow"


def test_the_time_is_the_shortest_of_repetitions(clock: Clock) -> None:
    """The first call loads the program; a pause in a repetition does not count."""
    kernel = xla.rel_attention
    clock.seconds = {kernel: [9.0, 1e-3, 0.5, 1e-3, 2e-3]}
    time = measure.time_kernel(kernel, SHAPE, OPTIONS)
    assert time == pytest.approx(100.0)
    count = math.ceil(measure.SECONDS / measure.REPEATS / 1e-3)
    assert clock.now == pytest.approx(9.001 + count * 0.503)


def test_a_kernel_is_used_where_xla_cannot_run(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Kernels are then compared on a few tiles only."""
    fakes = {"xla": has_no_memory, "other": chunked.rel_attention, "off": is_off}
    monkeypatch.setattr(measure, "KERNELS", measure.KERNELS | fakes)
    clock.seconds = {chunked.rel_attention: [1e-3]}
    trials = trials_of(fakes)
    assert choose(trials) == "other"
    assert trials["xla"] == "MemoryError: "
    assert str(trials["off"]).startswith("o is off by ")
    assert choose({"other": "a fault", "xla": "its error"}) == "xla"


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("R", [336, 90])
def test_an_error_in_one_distance_is_found_in_bfloat16(layers: int, R: int) -> None:
    sizes = 2, 2, 136, 200, 64, R
    work = Workload(sizes, "bfloat16", ("bias_HR",), 136, layers=layers)
    assert " is off by " in measure.find_error(one_distance_is_off, work)
    assert measure.find_error(chunked.rel_attention, work) == ""


def test_terms_without_effect_are_compared() -> None:
    """All keys share one distance, so the gradient of its scores is 0."""
    work = SHAPE._replace(sizes=(2, 2, 5, 7, 4, 1))
    assert measure.find_error(chunked.rel_attention, work) == ""


@pytest.mark.parametrize("layers", [0, 1])
def test_a_kernel_is_timed(layers: int) -> None:
    time = measure.try_kernel(chunked.rel_attention, SHAPE._replace(layers=layers))
    assert isinstance(time, float) and time > 0


def test_what_all_layers_keep_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xla` keeps the weights of all queries and keys; `chunked` does not."""
    monkeypatch.setattr(measure, "device_memory", lambda: 1 << 30)
    work = SHAPE._replace(sizes=(8, 8, 256, 256, 8, 512), dropout=0, layers=99)
    fault = measure.find_shortage(xla.rel_attention, work)
    assert fault == "99 layers keep 10 of 1 GiB"
    once = work._replace(layers=1)
    assert measure.find_shortage(xla.rel_attention, once) == ""
    assert measure.find_shortage(chunked.rel_attention, work) == ""
