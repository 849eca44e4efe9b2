"""`auto` selects only kernels that were checked on the device."""

import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from txl_jax.cli import proof
from txl_jax.cli.proof import prove_kernels
from txl_jax.kernels import check, chunked, dispatch, xla
from txl_jax.kernels.operands import Operands


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes `chunked` a candidate, small shapes and a cache folder of the test."""
    for name, size in {"L": 9, "M": 60, "A": 4}.items():
        monkeypatch.setattr(check, name, size)
    monkeypatch.setattr(dispatch, "candidates", lambda device: ["chunked"])
    monkeypatch.setattr(dispatch, "FAULTS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def prove(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> str:
    monkeypatch.setitem(dispatch.KERNELS, "chunked", kernel)
    prove_kernels("auto")
    return dispatch.FAULTS["chunked"]


def far_distances_are_off(operands: Operands) -> jax.Array:
    r_RHA: Any = operands.position.r_RHA
    position = operands.position._replace(r_RHA=r_RHA.at[0].add(1))
    return xla.rel_attention(operands._replace(position=position))


def bias_is_off(operands: Operands) -> jax.Array:
    bias_HR = operands.position.bias_HR
    if bias_HR is not None:
        bias_HR = bias_HR.at[:, 0].add(1)
    position = operands.position._replace(bias_HR=bias_HR)
    return xla.rel_attention(operands._replace(position=position))


def gradient_is_off(operands: Operands) -> jax.Array:
    v = operands.v_BKHA
    v -= 0.1 * (v - jax.lax.stop_gradient(v))
    return xla.rel_attention(operands._replace(v_BKHA=v))


def does_not_compile(operands: Operands) -> jax.Array:
    raise NotImplementedError("a tile\nof this size")


@pytest.mark.parametrize(
    "kernel, part",
    [
        (chunked.rel_attention, ""),
        (far_distances_are_off, "o is off by "),
        (bias_is_off, "o is off by "),
        (gradient_is_off, "the gradient of v_BKHA is off by 10%"),
        (does_not_compile, "NotImplementedError: a tile"),
    ],
)
def test_verdicts_are_reported_and_kept(
    kernel: Any,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = prove(monkeypatch, kernel)
    assert fault.startswith(part) and bool(fault) == bool(part)
    line = f'kernel = "auto" will not select chunked on cpu: {fault}'
    assert (line in capsys.readouterr().err) == bool(part)
    if "Error" not in fault:  # which may be transient
        assert prove(monkeypatch, None) == fault, "without another check"
    monkeypatch.setattr(jax, "__version__", "99")
    assert prove(monkeypatch, does_not_compile).startswith("NotImplementedError")


def test_a_check_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(proof, "MOST_SECONDS", 0)
    fault = prove(monkeypatch, lambda x: ended.wait() and does_not_compile(x))
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "check":  # Python must not exit while it uses jax
            thread.join()
    assert fault == "its check takes over 0 s"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(kernel: object) -> str:
        raise ValueError("a mistake")

    monkeypatch.setattr(check, "fault", fault)
    assert prove(monkeypatch, None) == "its check raised an exception"


def test_a_stated_kernel_is_not_checked() -> None:
    prove_kernels("chunked")
    assert dispatch.FAULTS == {}
