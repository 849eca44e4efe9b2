"""Steps compiled for NVIDIA GPUs, without GPUs; XLA:GPU compiles in this process.

Dims: N layers, B streams of one device, M memory, L segment, K = M + L keys, D model.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_compile import check_donated
from tests.support import trained
from txl_jax import config as configs
from txl_jax.aot import chips, gpus
from txl_jax.aot.hlo import Collective, HloProgram, collectives
from txl_jax.cli import compile_ahead
from txl_jax.config import Config
from txl_jax.metrics import parameter_count
from txl_jax.update.init import abstract_params
from txl_jax.workdir.fit import find_vocab, fit_mesh

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not gpus.installed(),
        reason="XLA:GPU, the GPU compiler, is not installed (extra gpu-aot)",
    ),
]
# All sizes differ, so that a shape identifies an array. `chunked` works on 3 blocks of
# 112 queries, padded from 320.
N, D, M, L, B = 2, 256, 384, 320, 2
EXPERIMENT = f"""
from txl_jax import config

def get_config():
    c = config.default()
    c.data.corpus = "enwik8"
    c.model.update(n_layer={N}, d_model={D}, n_head=4, d_head=48, d_inner=576)
    c.model.update(mem_len={M}, dropout=0.1, dropatt=0.1, dtype="bfloat16")
    c.train.update(batch_size={8 * B}, tgt_len={L}, segments_per_call=2)
    c.eval.update(streams=8, tgt_len=64, mem_len={M})
    return c
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpus") / "tiny.py"
    path.write_text(EXPERIMENT)
    return path


def compiled(path: Path, **changes: Any) -> tuple[Config, str, list[Collective]]:
    """Returns the config, and the text and collectives of its step on 8 H100."""
    tree = configs.load(str(path))
    for name, value in changes.items():
        tree["model" if name == "kernel" else "mesh"][name] = value
    config = find_vocab(configs.parse(tree))
    devices = chips.find_devices(chips.find("h100:8"))
    done = compile_ahead.compile_train_step(config, devices)
    check_donated(config, done, fit_mesh(config, devices))
    return config, done.text, collectives(HloProgram(done.text))


@pytest.mark.parametrize("kernel", ["xla", "chunked"])
def test_chunked_keeps_no_array_of_queries_by_keys(path: Path, kernel: str) -> None:
    config, text, exchanged = compiled(path, kernel=kernel)
    K, padded = L + M, 336
    scores = rf"\[[\d,]*\b(?:{L}|{padded}),{K}\]|\[[\d,]*\b{K},(?:{L}|{padded})\]"
    assert bool(re.search(scores, text)) == (kernel == "xla")
    # Data parallelism only sums gradients, those of weights in bfloat16: NCCL gets few,
    # large all-reduces over all GPUs.
    assert {each.kind for each in exchanged} == {"all-reduce"}
    params = parameter_count(abstract_params(config.model))
    sent = sum(each.bytes * each.times for each in exchanged)
    assert 2 * 2 * params < sent < 1.2 * 2 * 4 * params


def test_fsdp_gathers_parameters_and_scatters_gradients(path: Path) -> None:
    config, _, exchanged = compiled(path, kernel="chunked", data=2, fsdp=4)
    sizes = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    for each in exchanged:
        if each.kind in sizes:
            sizes[each.kind] += each.bytes * each.times
    # Forward and backward gather the layers, in bfloat16 or float32.
    params = parameter_count(abstract_params(config.model))
    assert 2 * params < sizes["all-gather"] / 2 < 2 * 1.2 * 4 * params


def test_every_gpu_is_known_to_the_compiler(path: Path) -> None:
    for name, gpu in gpus.GPUS.items():
        (device,) = chips.find_devices(chips.find(f"{name}:1"))
        assert (device.device_kind, device.platform) == (gpu.kind, "gpu")


def test_the_command_reports_memory_and_collectives(path: Path) -> None:
    argv = f"--mode=compile --config={path} --topology=b200:8".split()
    result = trained.command(*argv).result
    assert [result[name] for name in ("chips", "devices", "fits")] == [8, 8, True]
    assert result["hbm_capacity_bytes"] == int(0.75 * gpus.GPUS["b200"].memory)
    assert result["evaluation"]["fits"] and "all-reduce" in result["collectives"]
