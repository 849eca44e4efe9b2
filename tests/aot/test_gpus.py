"""Facts of GPUs, their topologies, and bounds on what passes through their switch."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding

from tests.support import tiny
from txl_jax.aot import chips, gpus, lower, roofline
from txl_jax.aot.traffic import Collective
from txl_jax.errors import UserError


@pytest.mark.parametrize("name", gpus.GPUS)
def test_the_facts_of_a_gpu_agree_with_each_other(name: str) -> None:
    gpu, part = gpus.GPUS[name], chips.find(f"{name}:8")
    assert (part.chips, part.shape, part.chip.cores) == (8, (1, 1, 8), 1)
    assert roofline.known_peak(gpu.kind) == gpu.flops == part.chip.flops
    assert gpus.limit(gpu.kind) == part.chip.hbm == 0.75 * gpu.memory
    # The description has the numbers that the bounds use, and those of the name.
    text = gpu.describe()
    assert f"device_memory_size: {gpu.memory}\n" in text
    assert f"memory_bandwidth: {gpu.bandwidth} " in text
    assert f'device_description_str: "{gpu.kind}"' in text
    for number, unit in ((80, "80GB"), (141, "141GB")):
        if unit in gpu.kind:
            assert number <= gpu.memory / 1e9 < 1.08 * number
    assert gpus.limit("cpu") == float("inf")


def test_a_missing_or_unsuited_compiler_names_the_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**options: Any) -> None:
        assert options["topology"] == "1x1x2"
        raise NotImplementedError("topology not implemented for cuda")

    part = chips.find("h100:2")
    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    for installed, words in (
        (False, r"pip install 'jax\[cuda13-local\]'$"),
        (True, r"not implemented for cuda\).*'jax\[cuda13-local\]==[\d.]+'$"),
    ):
        spec = installed or None
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(UserError, match=words):
            chips.find_devices(part)


def test_a_switch_sends_in_one_direction_at_once() -> None:
    part = chips.find("h100:8")
    coords, everyone = [(0, 0, i) for i in range(8)], tuple(range(8))
    for kind, size in (("all-gather", 7 / 8), ("all-reduce", 14 / 8)):
        exchange = Collective(kind, 10**9, everyone, 1, "")
        seconds = roofline.exchange_seconds(part, exchange, coords)
        assert seconds == pytest.approx(size * 1e9 / 4.5e11)
    exchange = Collective("all-to-all", 10**9, everyone, 1, "")
    seconds = roofline.exchange_seconds(part, exchange, coords)
    assert seconds == pytest.approx(7 / 8 * 1e9 / 4.5e11)


def test_a_step_that_exceeds_the_memory_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = tiny.one_device()
    place = NamedSharding(mesh, jax.P())
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)
    for limit, fits in ((64, True), (63, False)):
        monkeypatch.setattr(gpus, "limit", lambda _, limit=limit: limit)
        done = lower.compile_step(mesh, jax.jit(lambda x: 2 * x), x)
        assert (done.fits, done.bytes) == (fits, 64)
