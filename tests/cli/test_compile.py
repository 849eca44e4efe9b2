"""Steps compiled for TPU slices of 8 chips, without TPUs.

libtpu compiles in this process; without it most of this is skipped.

Dims: N layers, B streams, M memory, L segment, D model, HA heads x head.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import pytest

from experiments.benchmarks import pods
from experiments.benchmarks.hlo import HloProgram, collectives
from tests.cli.test_main import documented
from tests.support import trained
from tests.support.trained import Done
from txl_jax import config as configs
from txl_jax.aot import lower
from txl_jax.cli import compile_ahead
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import shards
from txl_jax.update.state import abstract_params, parameter_count
from txl_jax.workdir.resolve import find_vocab, fit_mesh

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed (pip install 'jax[tpu]')",
)
SLICE = "v5e:2x4"
# All sizes differ, so that a shape identifies an array.
N, D, HA, M, L, B = 3, 256, 128, 48, 40, 16
EXPERIMENT = f"""
from txl_jax import config

def get_config():
    c = config.default()
    c.data.corpus = "stdlib"
    c.model.update(n_layer={N}, d_model={D}, n_head=2, d_head=64, d_inner=384)
    c.model.update(mem_len={M}, dropout=0.1, dropatt=0.1)
    c.train.update(batch_size={B}, tgt_len={L}, segments_per_call=2)
    c.eval.update(streams=8, tgt_len={L}, mem_len={M})
    c.generate.mem_len = {M}
    return c
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aot") / "tiny.py"
    path.write_text(EXPERIMENT)
    return path


def command(path: Path, *argv: str) -> Done:
    return trained.command("--mode=compile", f"--config={path}", *argv)


def refusal(path: Path, *argv: str) -> str:
    """Returns the one line of a command that ends with status 2."""
    done = command(path, *argv)
    assert done.status == 2, done
    (line,) = done.err.splitlines()
    return line


def read(path: Path, **mesh: int) -> Config:
    config = configs.load(str(path))
    return dataclasses.replace(find_vocab(config), mesh=MeshConfig(**mesh))


def compiled(config: Config, topology: str = SLICE) -> Any:
    """Returns the compiled training step on a slice."""
    devices = lower.find_devices(lower.find_slices(topology))
    done = compile_ahead.compile_train_step(config, devices)
    assert done.program
    return done.program


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which `compile` adds its compiled steps."""
    made: list[Any] = []
    compile_steps = compile_ahead.compile_steps

    def keep(config: Config) -> Any:
        result, steps = compile_steps(config)
        made.append(steps)
        return result, steps

    monkeypatch.setattr(compile_ahead, "compile_steps", keep)
    return made


def text_of(program: jax.stages.Compiled) -> str:
    return program.as_text() or ""


@needs_libtpu
@pytest.mark.parametrize("gradient_segments", [1, 2])
def test_the_report_of_a_step(
    path: Path, gradient_segments: int, steps: list[Any]
) -> None:
    across = f"--config.train.gradient_segments={gradient_segments}"
    each_segment = "--config.train.segments_per_update=2"
    done = command(path, f"--topology={SLICE}", each_segment, across)
    result = done.result
    assert documented("compile", result)
    assert [result[name] for name in ("mode", "topology")] == ["compile", SLICE]
    assert [result[name] for name in ("chips", "cores", "devices")] == [8, 8, 8]
    assert result["mesh"] == {"data": 8, "fsdp": 1, "model": 1}
    assert (result["batch_size"], result["streams_per_chip"]) == (B, 2)
    for step in (result, result["evaluation"]):
        assert step["fits"] and 0 < step["hbm_bytes"] < step["hbm_capacity_bytes"]
        assert step["hbm_capacity_bytes"] == int(15.75 * 2**30)
        assert step["seconds_to_compile"] > 0 and step["flops_per_token"] > 0
    assert "fits" in done.err
    # Each part adds up all gradients once, whole, in float32; for W_r it adds up the
    # gradients of r, which are fewer, in bfloat16, the dtype of the product. libtpu
    # 0.0.50 adds up some small gradients once for both parts.
    params = parameter_count(abstract_params(read(path).model))
    parts, K = 2 // gradient_segments, M + gradient_segments * L
    once = 4 * (params - N * D * HA) + 2 * N * K * HA
    # A call has one update.
    added = pods.exchanges(steps[0]["training"].program)["all-reduce"]["bytes"]
    assert parts * 0.995 * once < added < parts * 1.005 * once
    assert set(pods.exchanges(steps[0]["evaluation"].program)) <= {"all-reduce"}


@needs_libtpu
def test_the_tpu_kernel_compiles(path: Path, steps: list[Any]) -> None:
    flags = ("--config.model.kernel=tpu", "--topology=v5p:2x2x2")
    result = command(path, *flags).result
    assert result["kernel"] == "tpu"
    # A chip of v5p is one device with two cores.
    assert [result[name] for name in ("chips", "cores", "devices")] == [8, 16, 8]
    text = text_of(steps[0]["training"].program)
    for kernel in ("rel_attention_forward", "rel_attention_backward"):
        assert f"{kernel}/pallas_call" in text
    assert 'custom_call_target="tpu_custom_call"' in text


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("kernel", ["xla", "tpu"])
def test_fast_weights_compile(path: Path, kernel: str) -> None:
    flags = ["--config.model.fast_weights=true", f"--topology={SLICE}"]
    result = command(path, *flags, f"--config.model.kernel={kernel}").result
    assert result["fits"] and result["evaluation"]["fits"]
    assert result["kernel"] == kernel


@needs_libtpu
def test_data_parallelism_only_sums_gradients(path: Path) -> None:
    program = compiled(read(path))
    exchanged = collectives(HloProgram(text_of(program)))
    assert {each.kind for each in exchanged} == {"all-reduce"}
    check_donated(read(path), program)


@needs_libtpu
def test_fsdp_gathers_only_parameters_one_layer_at_a_time(path: Path) -> None:
    config = read(path, data=2, fsdp=4)
    program = compiled(config)
    shapes = nn.unbox(abstract_params(config.model))
    sizes = {leaf.size / N for leaf in jax.tree.leaves(shapes.pop("layers"))}
    sizes |= {leaf.size for leaf in jax.tree.leaves(shapes)}
    for each in collectives(HloProgram(text_of(program))):
        if each.kind == "all-gather":
            # The vocabulary's table is gathered whole, the stacked layers one at a
            # time, in float32 or bfloat16. Neither batch nor memory is gathered.
            assert {each.bytes / 4, each.bytes / 2} & sizes, each
        elif each.kind in ("all-to-all", "collective-permute"):
            # Only the encodings of distances, which all streams share.
            assert each.bytes <= 4 * (L + M) * D
    check_donated(config, program)


def check_donated(config: Config, program: jax.stages.Compiled) -> None:
    """Asserts that the step writes the new state, memory too, over the old one."""
    assert "input_output_alias={" in text_of(program).partition("\n")[0]
    mesh = fit_mesh(config, lower.find_devices(lower.find_slices(SLICE)))
    own = config.train.batch_size // shards(mesh, "B")
    model, width = config.model, 4 if config.model.dtype == "float32" else 2
    memory = width * model.n_layer * own * model.mem_len * model.d_model
    adam = 3 * 4 * parameter_count(abstract_params(model)) // mesh.shape["fsdp"]
    use = program.memory_analysis()
    assert use and use.alias_size_in_bytes >= 0.99 * adam + memory


@needs_libtpu
def test_a_mesh_may_split_an_axis_of_the_slice() -> None:
    devices = lower.find_devices(lower.find_slices("v4:4x8x8"))
    for sizes in ((128, 1, 2), (4, 32, 2), (16, 8, 2)):
        mesh = make_mesh(MeshConfig(*sizes), devices)
        assert mesh.devices.shape == sizes
        pairs = [[device.coords for device in pair] for pair in mesh.devices[0]]
        for one, other in pairs:
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) == 1


@needs_libtpu
def test_streams_that_do_not_divide_need_another_mesh(path: Path) -> None:
    four = f"--topology={SLICE}", "--config.train.batch_size=4"
    assert "multiple of 8, or raise mesh.model" in refusal(path, *four)
    result = command(path, *four, "--mesh=auto").result
    assert result["mesh"] == {"data": 4, "fsdp": 1, "model": 2}
    assert result["streams_per_chip"] == 0.5
    three = f"--topology={SLICE}", "--config.train.batch_size=3"
    line = refusal(path, *three, "--mesh=auto")
    assert "change train.batch_size" in line
    assert "'v5e:3x5' is not a slice" in refusal(path, "--topology=v5e:3x5")


@needs_libtpu
def test_out_of_memory_has_the_excess_and_the_flags_that_help(path: Path) -> None:
    flags = (f"--topology={SLICE}", "--config.model.kernel=xla")
    done = command(
        path, *flags, "--config.train.batch_size=320000", "--config.eval.streams=4"
    )
    result = done.result
    assert not result["fits"]
    over = result["hbm_bytes"] - result["hbm_capacity_bytes"]
    assert result["exceeds_by_bytes"] == over > 0
    for knob in ("remat", "fsdp", "batch_chunk"):
        assert knob in result["knobs"]
    assert f"{over / 2**30:.2f} GiB too much" in done.err
    assert "eval.streams = 4 is not divisible" in result["evaluation"]["error"]


def test_missing_libtpu_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "libtpu" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert refusal(path).endswith("pip install 'jax[tpu]'")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 256),
        ({"corpus": "wikitext103"}, 267_735),
        ({"corpus": "wikitext103", "vocab_size": 3}, 0),
        ({"vocab": "word"}, 0),
    ],
)
def test_known_vocabularies(path: Path, changes: dict[str, Any], size: int) -> None:
    values = {f"data.{key}": value for key, value in changes.items()}
    config = configs.with_values(configs.load(str(path)), values)
    if size:
        assert find_vocab(config).model.vocab_size == size
        return
    with pytest.raises(UserError, match="--config.model.vocab_size=N"):
        find_vocab(config)
    config = configs.with_values(config, {"model.vocab_size": 99})
    assert find_vocab(config) == config
