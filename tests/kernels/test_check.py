"""A kernel is compared with the einsum, forward and backward."""

from typing import Any

import jax
import pytest

from txl_jax.kernels import check, chunked, xla
from txl_jax.kernels.operands import Operands


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
    "kernel, fault",
    [
        (chunked.rel_attention, ""),
        (far_distances_are_off, "o is off by "),
        (bias_is_off, "o is off by "),
        (gradient_is_off, "the gradient of v_BKHA is off by 10%"),
        (does_not_compile, "NotImplementedError: a tile"),
    ],
)
def test_faults_are_found(
    kernel: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"L": 9, "M": 60, "A": 4}.items():
        monkeypatch.setattr(check, name, size)
    found = check.fault(kernel)
    assert found.startswith(fault) and bool(found) == bool(fault)
