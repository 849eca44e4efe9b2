"""Steps compiled for TPU slices of 8 chips, without TPUs.

libtpu compiles in this process; without it most of this is skipped.

Dims: N layers, B streams, M memory, L segment, D model, HA heads x head.
"""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import pytest
from jax.sharding import Mesh

from tests.cli.test_main import documented
from tests.support import trained
from tests.support.trained import Done
from txl_jax import config as configs
from txl_jax.aot import chips, estimate
from txl_jax.aot.estimate import Work
from txl_jax.aot.hlo import Program
from txl_jax.aot.lower import Compiled
from txl_jax.aot.traffic import collectives
from txl_jax.cli import compile, steps
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.metrics import parameter_count
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import shards
from txl_jax.update.init import abstract_params

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
    """Returns the experiment on a mesh of the slice."""
    config = configs.parse(configs.load(str(path)))
    return dataclasses.replace(steps.find_vocab(config), mesh=MeshConfig(**mesh))


def compiled(config: Config) -> Compiled:
    """Returns the training step, compiled for the slice."""
    done = steps.compile_train(config, chips.find_devices(chips.find(SLICE)))
    assert done.fits
    return done


@needs_libtpu
def test_the_json_has_the_memory_and_bounds_on_speed(path: Path) -> None:
    done = command(path, f"--topology={SLICE}", "--config.train.segments_per_update=2")
    result = done.result
    assert documented("compile", result)
    assert [result[name] for name in ("mode", "topology")] == ["compile", SLICE]
    assert [result[name] for name in ("chips", "cores", "devices")] == [8, 8, 8]
    assert result["mesh"] == {"data": 8, "fsdp": 1, "model": 1}
    assert (result["batch_size"], result["streams_per_chip"]) == (B, 2)
    for step in (result, result["evaluation"]):
        assert step["fits"] and 0 < step["hbm_bytes"] < step["hbm_capacity_bytes"]
        assert step["hbm_capacity_bytes"] == int(15.75 * 2**30)
        assert step["seconds_to_compile"] > 0 and step["hbm_traffic_bytes"] > 0
        scopes = step["hbm_traffic_by_scope"]
        assert {"attention", "feed_forward"} <= set(scopes)
        total = pytest.approx(step["hbm_traffic_bytes"], abs=len(scopes))
        assert sum(scopes.values()) == total
        assert step["limit"] == max(step["seconds"], key=step["seconds"].get)
        slowest = sum(step["seconds"].values())
        speed = step["tokens"] / slowest
        assert step["step_seconds"]["no_overlap"] == pytest.approx(slowest)
        assert step["tokens_per_second"]["no_overlap"] == pytest.approx(speed)
        used = speed * step["flops_per_token"] / (8 * 197e12)
        assert step["utilisation"]["no_overlap"] == pytest.approx(used)
    assert result["tokens"] == 2 * B * L
    assert result["evaluation"]["tokens"] == 8 * L
    # All gradients are added up once for each segment, whole, in float32; but of W_r's
    # those of r, which are fewer, in bfloat16, as the product takes them. libtpu 0.0.50
    # adds some small ones up once for both.
    params = parameter_count(abstract_params(read(path).model))
    once = 4 * (params - N * D * HA) + 2 * N * (M + L) * HA
    added = result["collectives"]["all-reduce"]["bytes"]
    assert 1.99 * once < added < 2.01 * once
    assert set(result["evaluation"]["collectives"]) <= {"all-reduce"}
    assert "fits" in done.err and "tokens per second" in done.err


@needs_libtpu
def test_the_kernel_for_tpus_is_compiled_where_it_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def read(text: str) -> Program:
        texts.append(text)
        return Program(text)

    monkeypatch.setattr(estimate, "Program", read)
    flags = ("--config.model.kernel=tpu", "--topology=v4:2x2x2")
    result = command(path, *flags).result
    assert result["kernel"] == "tpu"
    # A chip of v4 is one device with two cores.
    assert [result[name] for name in ("chips", "cores", "devices")] == [8, 16, 8]
    # The bytes of a kernel are counted by this name.
    kernels = {
        op.path.split("/")[-2]: 'custom_call_target="tpu_custom_call"' in op.text
        for op, _, _ in Program(texts[0]).visit()
        if op.kind == "custom-call" and op.path.endswith("pallas_call")
    }
    assert kernels == {"rel_attention_forward": True, "rel_attention_backward": True}


@needs_libtpu
def test_data_parallelism_only_sums_gradients(path: Path) -> None:
    done = compiled(read(path))
    exchanged = collectives(Program(done.text))
    assert {each.kind for each in exchanged} == {"all-reduce"}
    assert max(len(each.group) for each in exchanged) == 8
    check_donated(read(path), done)


@needs_libtpu
def test_fsdp_gathers_only_parameters_one_layer_at_a_time(path: Path) -> None:
    config = read(path, data=2, fsdp=4)
    done = compiled(config)
    shapes = nn.unbox(abstract_params(config.model))
    sizes = {leaf.size / N for leaf in jax.tree.leaves(shapes.pop("layers"))}
    sizes |= {leaf.size for leaf in jax.tree.leaves(shapes)}
    for each in collectives(Program(done.text)):
        if each.kind == "all-gather":
            assert len(each.group) == 4  # within a copy of the model, never all devices
            # The vocabulary's table is gathered whole, the stacked layers one at a
            # time, in float32 or bfloat16. Neither batch nor memory is gathered.
            assert {each.bytes / 4, each.bytes / 2} & sizes, each
        elif each.kind in ("all-to-all", "collective-permute"):
            # Only the encodings of distances, which all streams share.
            assert each.bytes <= 4 * (L + M) * D
    check_donated(config, done)


def check_donated(config: Config, done: Compiled, mesh: Mesh | None = None) -> None:
    """Asserts that the step writes the new state, memory too, over the old one."""
    assert "input_output_alias={" in done.text.partition("\n")[0]
    mesh = mesh or steps.check_mesh(config, chips.find_devices(chips.find(SLICE)))
    own = config.train.batch_size // shards(mesh, "B")
    model, width = config.model, 4 if config.model.dtype == "float32" else 2
    memory = width * model.n_layer * own * model.mem_len * model.d_model
    adam = 3 * 4 * parameter_count(abstract_params(model)) // mesh.shape["fsdp"]
    assert done.aliased >= 0.99 * adam + memory


@needs_libtpu
def test_a_mesh_may_split_an_axis_of_the_slice() -> None:
    devices = chips.find_devices(chips.find("v4:4x8x8"))
    for sizes in ((128, 1, 2), (4, 32, 2), (16, 8, 2)):
        mesh = make_mesh(MeshConfig(*sizes), devices)
        assert mesh.devices.shape == sizes
        pairs = [[device.coords for device in pair] for pair in mesh.devices[0]]
        for one, other in pairs:
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) == 1


@needs_libtpu
def test_streams_that_do_not_divide_name_a_mesh_that_works(path: Path) -> None:
    flags = (f"--topology={SLICE}", "--config.train.batch_size=4")
    line = refusal(path, *flags)
    assert "train.batch_size = 4 is not divisible by the 8 shards" in line
    assert "--config.mesh.model=2 works" in line
    result = command(path, *flags, "--mesh=auto").result
    assert result["mesh"] == {"data": 4, "fsdp": 1, "model": 2}
    assert result["streams_per_chip"] == 0.5
    line = refusal(path, f"--topology={SLICE}", "--config.train.batch_size=3")
    assert "take --streams_per_chip=1" in line
    assert "'v5e:3x5' is not a slice" in refusal(path, "--topology=v5e:3x5")


@needs_libtpu
def test_out_of_memory_has_the_excess_and_the_flags_that_help(path: Path) -> None:
    flags = (f"--topology={SLICE}", "--config.model.kernel=xla")
    done = command(path, *flags, "--streams_per_chip=40000", "--config.eval.streams=4")
    result = done.result
    assert not result["fits"]
    over = result["hbm_bytes"] - result["hbm_capacity_bytes"]
    assert result["exceeds_by_bytes"] == over > 0
    for knob in ("remat", "fsdp", "batch_chunk", "kernel", "streams_per_chip"):
        assert knob in result["knobs"]
    assert f"{over / 2**30:.2f} GiB too much" in done.err
    assert "eval.streams = 4 is not divisible" in result["evaluation"]["error"]


@pytest.mark.parametrize("first", [1, 40, 1024])
@pytest.mark.parametrize("most", [0, 1, 5, 37, 1000, 5000])
def test_the_search_finds_the_most_that_fit(most: int, first: int) -> None:
    tried = []

    def fits(count: int) -> tuple[bool, int]:
        tried.append(count)
        return count <= most, 1000 + 10 * count + count**2 // 50

    capacity = 1000 + 10 * most + most**2 // 50
    assert compile.search(fits, capacity, 1024, first) == min(most, 1024)
    assert len(tried) == len(set(tried)) <= 9


def test_the_search_continues_where_more_is_stated_than_the_capacity() -> None:
    def fits(count: int) -> tuple[bool, int]:
        return count <= 140, 500 + 75 * count if count <= 140 else 9700 + count

    assert compile.search(fits, 9573, 1024) == 140


@pytest.mark.parametrize(
    "keeping_all, policy, tried", [(2, "dots", [2, 5, 9]), (5000, "none", [512])]
)
def test_the_search_finds_the_policy_with_the_most_tokens_per_second(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeping_all: int,
    policy: str,
    tried: list[int],
) -> None:
    """Compilation and estimate are replaced: here only the search is tested."""
    most = {"none": keeping_all, "dots": 5, "full": 9}  # streams per chip that fit
    slowness = {"none": 1.0, "dots": 1.2, "full": 3.0}

    def compile_train(config: Config, devices: list[Any]) -> Compiled:
        policy, size = config.model.remat_policy, config.train.batch_size // 8
        fits = size <= most[policy]
        return Compiled("x" if fits else "", size * 15 * 2**30 // most[policy], 0.0)

    def estimate(tpus: Any, mesh: Any, done: Compiled, work: Work) -> dict[str, Any]:
        rate = work.streams / slowness[work.model.remat_policy]
        costs = {"fits": done.fits, "hbm_bytes": done.bytes}
        return costs | {"tokens_per_second": {"no_overlap": rate}}

    monkeypatch.setattr(steps, "compile_train", compile_train)
    monkeypatch.setattr(compile, "estimate", estimate)
    monkeypatch.setattr(compile, "fit_mesh", lambda *_: SimpleNamespace(shape={}))
    monkeypatch.setattr(steps, "fit_mesh", lambda *_: None)
    devices = [SimpleNamespace(platform="cpu", device_kind="virtual")] * 8
    found = compile.search_policies(read(path), devices, chips.find(SLICE))
    config, result = found
    assert config.model.remat_policy == result["remat_policy"] == policy
    assert config.train.batch_size == 8 * result["streams_per_chip"]
    assert [each["streams_per_chip"] for each in result["candidates"]] == tried


def test_without_libtpu_the_error_has_the_command_to_install_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ({"corpus": "enwik8", "vocab": "byte"}, 256),
        ({"corpus": "wikitext103", "vocab_size": 3}, 0),
        ({"vocab": "word"}, 0),
    ],
)
def test_published_vocabularies_are_known(
    path: Path, changes: dict[str, Any], size: int
) -> None:
    config = steps.replace(configs.parse(configs.load(str(path))), "data", **changes)
    if size:
        assert steps.find_vocab(config).model.vocab_size == size
        return
    with pytest.raises(UserError, match="--config.model.vocab_size=N"):
        steps.find_vocab(config)
    config = steps.replace(config, "model", vocab_size=99)
    assert steps.find_vocab(config) == config


def test_the_share_of_the_network_is_reported_for_several_slices() -> None:
    both = {"full_overlap": 1.0, "no_overlap": 2.0}
    fields = "step_seconds", "tokens_per_second", "utilisation"
    sent = {"cross-slice": {"count": 3, "bytes": 2_000_000}}
    step: dict[str, Any] = dict.fromkeys(fields, both)
    step |= {"fits": True, "hbm_bytes": 1, "hbm_capacity_bytes": 2, "limit": "network"}
    step |= {"collectives": sent, "cross_slice_share": 0.25}
    size = {"topology": "v5e:4x4", "chips": 32, "cores": 32, "devices": 32, "mesh": {}}
    other = {"evaluation": {"error": "none"}}
    for slices in (1, 2):
        lines = "\n".join(compile.table({**step, **size, **other, "slices": slices}))
        assert ("network  25% of a step" in lines) == (slices == 2)
        assert "cross-slice  3 of 2.0 MB" in lines
