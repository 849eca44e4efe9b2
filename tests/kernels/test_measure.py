"""Kernels are compared with `xla`, timed, and the fastest right one is chosen."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.support import tiny
from txl_jax.kernels import chunked, measure, xla
from txl_jax.kernels.check import make_operands
from txl_jax.kernels.measure import Workload, choose, describe
from txl_jax.kernels.operands import Operands
from txl_jax.workdir.kernel_choice import make_workload

SHAPE = Workload(
    (2, 2, 5, 7, 4, 12), "float32", ("bias_HR",), 3, dropout=0.1, backward=True
)


def is_off(operands: Operands) -> jax.Array:
    o_BLHA = xla.rel_attention(operands)
    return o_BLHA.at[1, 0, 0, 0].mul(1.5)


def farthest_distance_is_off(operands: Operands) -> jax.Array:
    r_RHA: Any = operands.position.r_RHA
    position = operands.position._replace(r_RHA=r_RHA.at[0].add(1))
    return xla.rel_attention(operands._replace(position=position))


def farthest_bias_is_off(operands: Operands) -> jax.Array:
    bias_HR: Any = operands.position.bias_HR
    position = operands.position._replace(bias_HR=bias_HR.at[:, 0].add(1))
    return xla.rel_attention(operands._replace(position=position))


def has_wrong_gradient(operands: Operands) -> jax.Array:
    v = operands.v_BKHA
    v -= 0.1 * (v - jax.lax.stop_gradient(v))
    return xla.rel_attention(operands._replace(v_BKHA=v))


def does_not_compile(operands: Operands) -> jax.Array:
    raise NotImplementedError("a tile\nof this size")


def has_no_memory(operands: Operands) -> jax.Array:
    if operands.q_BLHA.shape[1] == SHAPE.sizes[2]:
        raise MemoryError
    return xla.rel_attention(operands)


Kernel = Callable[..., Any]


def time_as(monkeypatch: pytest.MonkeyPatch, seconds: dict[Kernel, float]) -> None:
    """Lets a call of each kernel take given seconds."""

    def time_calls(
        kernel: Kernel, operands: Operands, backward: bool, count: int
    ) -> float:
        assert backward and operands.oldest_BL.tolist() == [[0, 0, 0, 3, 3]] * 2
        return seconds[kernel]

    monkeypatch.setattr(measure, "time_calls", time_calls)


def test_the_fastest_right_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "off": is_off,
        "gradient": has_wrong_gradient,
        "error": does_not_compile,
        "slow": chunked.rel_attention,
        "xla": xla.rel_attention,
    }
    monkeypatch.setattr(measure, "KERNELS", measure.KERNELS | fakes)
    time_as(monkeypatch, {xla.rel_attention: 2e-3, chunked.rel_attention: 3e-3})
    trials = measure.measure(dict.fromkeys(fakes, SHAPE))
    assert choose(trials) == "xla"
    # A call of 10 queries takes 2 and 3 ms.
    assert trials["xla"] == 200.0 and trials["slow"] == 300.0
    assert [*trials][:2] == ["xla", "slow"]
    assert str(trials["off"]).startswith("o is off by ")
    assert str(trials["gradient"]).startswith("the gradient of v_BKHA is off by 10.0%")
    assert trials["error"] == "NotImplementedError: a tile"
    assert describe(trials).startswith("xla 2e+02 ms, slow 3e+02 ms, error NotImpl")
    time_as(monkeypatch, {xla.rel_attention: 2e-3, chunked.rel_attention: 1e-3})
    trials = measure.measure(dict.fromkeys(("xla", "slow"), SHAPE))
    assert choose(trials) == "slow"


def test_a_kernel_is_used_where_xla_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared on a small workload only."""
    fakes = {"xla": has_no_memory, "other": chunked.rel_attention, "off": is_off}
    monkeypatch.setattr(measure, "KERNELS", measure.KERNELS | fakes)
    time_as(monkeypatch, {chunked.rel_attention: 1e-3})
    trials = measure.measure(dict.fromkeys(fakes, SHAPE))
    assert choose(trials) == "other"
    assert trials["xla"] == "MemoryError: "
    assert str(trials["off"]).startswith("o is off by ")
    assert choose({"other": "a fault", "xla": "its error"}) == "xla"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_in_one_distance_is_found(dtype: str) -> None:
    """Also where the output in the run's dtype does not show it."""
    work = SHAPE._replace(absent=(), dtype=dtype, backward=False)
    operands = make_operands((2, 2, 136, 200, 4, 336), "bfloat16", ())
    for kernel in (farthest_distance_is_off, farthest_bias_is_off):
        assert measure.find_error(kernel, operands, False) == ""
        assert str(measure.try_kernel(kernel, work)).startswith("o is off by ")
    assert isinstance(measure.try_kernel(chunked.rel_attention, work), float)


def test_a_kernel_is_timed() -> None:
    time = measure.try_kernel(xla.rel_attention, SHAPE)
    assert isinstance(time, float) and time > 0


def test_queries_of_same_length_see_as_many_keys() -> None:
    config = tiny.config(same_length=True, mem_len=5)
    work = make_workload(config, tiny.one_device(), B=1, T=4, L=4, training=False)
    assert measure.see_all(work).tolist() == [[1, 2, 3, 4]]


def test_what_all_layers_keep_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xla` keeps the weights of all queries and keys; `chunked` does not."""
    monkeypatch.setattr(measure, "device_memory", lambda: 1 << 30)
    shape = 8, 8, 256, 256, 8, 512
    operands = jax.eval_shape(lambda: make_operands(shape, "float32", ("bias_HR",), 0))
    fault = measure.find_shortage(xla.rel_attention, operands, 99)
    assert fault == "99 layers need 10 of 1 GiB"
    assert measure.find_shortage(chunked.rel_attention, operands, 1) == ""


@pytest.mark.parametrize(
    ("changes", "absent", "R"),
    [
        ({}, "bias_HR", 9),
        ({"clamp_len": 3}, "bias_HR", 4),
        ({"position": "alibi"}, "r_RHA u_HA w_HA", 9),
        ({"position": "shaw_biased", "n_position": 4}, "w_HA", 4),
        ({"position": "rotary", "d_head": 4}, "r_RHA u_HA w_HA bias_HR", 9),
    ],
    ids=str,
)
def test_a_workload_has_the_terms_of_the_scheme(
    changes: dict[str, Any], absent: str, R: int
) -> None:
    config = tiny.config(dropatt=0.1, **changes)
    work = make_workload(config, tiny.one_device(), B=3, T=4, L=2, training=True)
    assert work.sizes == (3, tiny.H, 4, 5, config.d_head, R)
    assert (work.segment_len, work.keys_per_query) == (2, 0)
    assert work.absent == tuple(absent.split())
    assert (work.dropout, work.backward, work.layers) == (0.1, True, tiny.N)
    operands = measure.make_operands(work)
    assert operands.k_BKHA.shape == (3, 9, tiny.H, config.d_head)
    reading = make_workload(config, tiny.one_device(), B=3, T=4, L=4, training=False)
    assert (reading.dropout, reading.backward, reading.layers) == (0.0, False, 1)
