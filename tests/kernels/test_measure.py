"""Kernels are compared with `xla`, timed, and the fastest right one is chosen."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.support import tiny
from txl_jax.kernels import chunked, measure, xla
from txl_jax.kernels.measure import Trial, Workload, choose, describe, find_candidates
from txl_jax.kernels.operands import Operands
from txl_jax.workdir.kernel_choice import make_workload

SHAPE = Workload(
    (2, 2, 5, 7, 4, 12), "float32", ("bias_HR",), 3, dropout=0.1, backward=True
)


def is_off(operands: Operands) -> jax.Array:
    o_BLHA = xla.rel_attention(operands)
    return o_BLHA.at[1, 0, 0, 0].mul(1.5)


def has_wrong_gradient(operands: Operands) -> jax.Array:
    o_BLHA = xla.rel_attention(operands)
    return 0.5 * o_BLHA + 0.5 * jax.lax.stop_gradient(o_BLHA)


def does_not_compile(operands: Operands) -> jax.Array:
    raise NotImplementedError("a tile")


def time_as(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[Callable[..., Any], float]
) -> None:
    """Lets a call of each kernel take given seconds."""
    compiled = measure.compiled

    def time_calls(run: Any, operands: Operands, count: int) -> float:
        assert operands.oldest_BL.tolist() == [[0, 0, 0, 3, 3]] * 2
        return next(s for x, s in seconds.items() if compiled(x, SHAPE) is run)

    monkeypatch.setattr(measure, "time_calls", time_calls)


def test_the_fastest_right_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "xla": xla.rel_attention,
        "slow": chunked.rel_attention,
        "off": is_off,
        "gradient": has_wrong_gradient,
        "error": does_not_compile,
    }
    monkeypatch.setattr(measure, "KERNELS", fakes)
    time_as(monkeypatch, {xla.rel_attention: 2e-3, chunked.rel_attention: 3e-3})
    trials = measure.measure(dict.fromkeys(fakes, SHAPE))
    assert choose(trials) == "xla"
    assert not measure.make_operands.cache_info().currsize, "the memory is free again"
    assert trials["xla"] == Trial(2e-3 * 1e6 / 10) and trials["slow"] == Trial(300.0)
    assert trials["off"].fault.startswith("o is off by ")
    assert trials["gradient"].fault.startswith("the gradient of k_BKHA is off by 50%")
    assert trials["error"].fault == "NotImplementedError: a tile"
    assert describe(trials).startswith("xla 2e+02 ms, slow 3e+02 ms, off o is off by")
    time_as(monkeypatch, {xla.rel_attention: 2e-3, chunked.rel_attention: 1e-3})
    trials = measure.measure(dict.fromkeys(("xla", "slow"), SHAPE))
    assert choose(trials) == "slow"


def test_a_kernel_is_used_where_xla_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"xla": does_not_compile, "other": chunked.rel_attention, "off": is_off}
    monkeypatch.setattr(measure, "KERNELS", fakes)
    time_as(monkeypatch, {chunked.rel_attention: 1e-3})
    for name, size in {"L": 9, "M": 60, "A": 4}.items():
        monkeypatch.setattr(measure.check, name, size)
    trials = measure.measure(dict.fromkeys(fakes, SHAPE))
    assert choose(trials) == "other"
    assert trials["xla"].fault == "NotImplementedError: a tile"
    assert trials["off"].fault.startswith("o is off by ")
    assert choose({"xla": Trial(fault="a"), "other": Trial(fault="b")}) == "xla"


def test_queries_of_same_length_see_as_many_keys() -> None:
    config = tiny.config(same_length=True, mem_len=5)
    work = make_workload(config, B=1, T=4, L=4, training=False)
    assert measure.see_all(work).tolist() == [[1, 2, 3, 4]]


def test_what_all_layers_keep_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xla` keeps the weights of all queries and keys; `chunked` does not."""
    monkeypatch.setattr(measure, "device_memory", lambda: 1 << 30)
    large = Workload(
        (8, 8, 256, 256, 8, 512), "float32", ("bias_HR",), 256, backward=True, layers=99
    )
    assert measure.find_fault("xla", large) == "99 layers need 10 of 1 GiB"
    one = large._replace(layers=1)
    assert measure.find_fault("chunked", one) == ""


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
    work = make_workload(config, B=3, T=4, L=2, training=True)
    assert work.sizes == (3, tiny.H, 4, 5, config.d_head, R)
    assert (work.segment_len, work.keys_per_query) == (2, 0)
    assert work.absent == tuple(absent.split())
    assert (work.dropout, work.backward, work.layers) == (0.1, True, tiny.N)
    operands = measure.make_operands(work)
    assert operands.k_BKHA.shape == (3, 9, tiny.H, config.d_head)
    reading = make_workload(config, B=3, T=4, L=4, training=False)
    assert (reading.dropout, reading.backward, reading.layers) == (0.0, False, 1)


def test_candidates_are_kernels_that_apply() -> None:
    def on(platform: str, kind: str, capability: str = "") -> Any:
        fields = dict(platform=platform, device_kind=kind)
        return type("Device", (), {**fields, "compute_capability": capability})()

    short = SHAPE._replace(dtype="bfloat16", dropout=0.0)
    assert find_candidates(on("cpu", "cpu"), short) == ["xla"]
    assert find_candidates(on("gpu", "H100", "9.0"), short) == [
        "xla",
        "chunked",
        "cudnn",
    ]
    assert find_candidates(on("gpu", "H100", "9.0"), SHAPE) == ["xla", "chunked"]
    assert find_candidates(on("tpu", "TPU v5p"), short) == ["xla", "chunked", "tpu"]
    assert find_candidates(on("tpu", "TPU v3"), short) == ["xla", "chunked"]
