"""Facts of GPUs and their topologies."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding

from tests.support import tiny
from txl_jax.aot import chips, gpus, lower
from txl_jax.errors import UserError
from txl_jax.report import peak


@pytest.mark.parametrize("name", gpus.GPUS)
def test_gpu_descriptions_are_consistent(name: str) -> None:
    gpu, part = gpus.GPUS[name], chips.find(f"{name}:8")
    assert (part.chips, part.chip.cores) == (8, 1)
    assert peak.known_peak(gpu.kind) > 0
    assert gpus.limit(gpu.kind) == part.chip.hbm == 0.75 * gpu.memory
    for number, unit in ((80, "80GB"), (141, "141GB")):
        if unit in gpu.kind:
            assert number <= gpu.memory / 1e9 < 1.08 * number
    assert gpus.limit("cpu") == float("inf")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_step_beyond_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = tiny.one_device()
    place = NamedSharding(mesh, jax.P())
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)
    for limit, fits in ((64, True), (63, False)):
        monkeypatch.setattr(gpus, "limit", lambda _, limit=limit: limit)
        done = lower.compile_step_for(mesh, jax.jit(lambda x: 2 * x), x)
        assert (done.fits, done.bytes) == (fits, 64)
