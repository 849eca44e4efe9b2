"""How many segments are computed together, for the published models and for others."""

import dataclasses
import functools
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from experiments.benchmarks.subject import ENWIK8
from tests.support import tiny
from txl_jax.evaluate import grouping
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.kernels import cudnn
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.sharded import follow_mesh
from txl_jax.sharding.mesh import AXES, make_mesh
from txl_jax.sharding.options import MeshConfig


@pytest.mark.parametrize(
    "kernel, M, B, L, expected",
    [
        ("xla", 2100, 1, 80, (12, 160)),
        ("auto", 2100, 1, 80, (12, 160)),
        ("chunked", 2100, 1, 80, (12, 960)),
        ("xla", 32, 1, 32, (32, 32)),
        ("xla", 3800, 1, 8, (128, 128)),
        ("xla", 3800, 16, 128, (1, 128)),
        ("xla", 0, 1, 128, (1, 128)),
    ],
)
def test_sizes(kernel: str, M: int, B: int, L: int, expected: tuple[int, int]) -> None:
    config = dataclasses.replace(ENWIK8, kernel=kernel, mem_len=M)
    segments = count_segments(config, 0, B, L)
    assert (segments, window_tokens(config, segments, B, L)) == expected
    assert count_segments(config, 3 if M else 0, B, L) == (3 if M else 1)


def test_a_gpu_reads_more_segments_in_windows_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axes, device = (AxisType.Auto,) * 3, AbstractDevice("H100", None, "gpu")
    absent = AbstractMesh((1, 1, 1), AXES, axis_types=axes, abstract_device=device)
    config = dataclasses.replace(ENWIK8, mem_len=2100, kernel="cudnn")
    with jax.sharding.use_abstract_mesh(absent):
        assert count_segments(config, 0, 10, 80) == 16
        windows = [window_tokens(config, 16, B, 80) for B in (1, 10, 32)]
        assert windows == [640, 320, 80]
        monkeypatch.setattr(grouping, "device_memory", lambda: 8e9)
        assert count_segments(config, 0, 10, 80) == 4

    choice: Any = dict(streams=3, tgt_len=4, mem_len=9)
    local = functools.partial(cudnn.rel_attention, implementation="xla")
    monkeypatch.setitem(KERNELS, "cudnn", follow_mesh(local))
    monkeypatch.setattr(grouping, "ROWS", 8 * 12)
    monkeypatch.setattr(grouping, "CPU_ROWS", 24)
    model, tokens = tiny.config(kernel="cudnn"), tiny.make_tokens(1, 120)[0]
    nlls = []
    for segments in (0, 1):
        options = EvalConfig(**choice, segments_per_step=segments)
        evaluate = make_evaluate(
            model, options, make_mesh(MeshConfig(data=1), jax.devices()[:1])
        )
        nlls.append(evaluate(tiny.make_params(model), tokens, lambda *_: None)["nll"])
    assert count_segments(dataclasses.replace(model, mem_len=9), 0, 3, 4) == 8
    assert window_tokens(dataclasses.replace(model, mem_len=9), 8, 3, 4) == 8
    assert nlls[0] == pytest.approx(nlls[1], rel=1e-5)
