"""A trained model in one file: exported, loaded in Python, and imported."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import txl_jax
from tests.cli.test_main import documented
from tests.convert.test_huggingface import folder_of
from tests.convert.test_pytorch import case
from tests.support.refusal import refused
from tests.support.tiny import assert_equal
from tests.support.trained import Done, Home, command, home
from txl_jax import config as configs
from txl_jax.checkpoint import manifest
from txl_jax.convert.release import read_release, save_release
from txl_jax.data.byte_ranges import checksum
from txl_jax.errors import BadNumbers, UserError

FIXTURES = (home,)


@pytest.fixture(scope="module")
def model(home: Home) -> Path:
    """Returns the file of the trained run's best model."""
    target = home.path / "models" / "tiny.safetensors"
    done = home.read("export", "--format=txl_jax", f"--target={target}")
    assert documented("export", done.result)
    assert done.result["sha256"] == {str(target): checksum(target)}
    assert "exported" in done.err
    return target


def imported(model: Path, workdir: Path, *flags: str) -> Done:
    common = ("--format=txl_jax", f"--source={model}", f"--workdir={workdir}")
    return command("--mode=import", *common, *flags)


def test_a_release_loads_like_its_workdir(home: Home, model: Path) -> None:
    from_run, from_file = txl_jax.load(home.run), txl_jax.load(str(model))
    assert_equal(from_file.params, from_run.params)
    assert from_file.step == from_run.step
    assert from_file.vocab.to_json() == from_run.vocab.to_json()
    assert from_file.config.model == from_run.config.model
    different = configs.differences(from_run.config, from_file.config)
    local = {"data.path", "data.data_dir", "checkpoint.every_steps"}
    assert set(different) <= local
    sharded = from_file.params["layers"]["attention"]["q"].sharding
    assert sharded == from_run.params["layers"]["attention"]["q"].sharding


def test_an_import_scores_the_same(home: Home, model: Path, tmp_path: Path) -> None:
    data = [f"--config.data.path={home.path / 'text.txt'}"]
    data += [f"--config.data.data_dir={home.path / 'data'}"]
    done = imported(model, tmp_path / "again", *data, "--config.eval.tgt_len=4")
    assert documented("import", done.result)
    assert done.result["sha256"] == {str(model): checksum(model)}
    run = json.loads((tmp_path / "again" / "run.json").read_text())
    assert run["imported"]["origin"]["device_count"] == 8
    flags = ("--split=valid", "--tgt_len=4", "--max_tokens=200")
    again = command("--mode=evaluate", f"--workdir={tmp_path / 'again'}", *flags)
    assert again.result["nll"] == home.read("evaluate", *flags).result["nll"]
    assert again.result["step"] == done.result["step"]


def test_a_model_of_another_code_base_keeps_its_origin(tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    flags = (f"--source={tmp_path / 'model'}", f"--workdir={tmp_path / 'run'}")
    assert command("--mode=import", "--format=huggingface", *flags).status == 0
    target = tmp_path / "one.safetensors"
    flags = (f"--workdir={tmp_path / 'run'}", f"--target={target}")
    assert command("--mode=export", "--format=txl_jax", *flags).status == 0
    assert read_release(target).origin["imported"]["format"] == "huggingface"
    assert_equal(txl_jax.load(target).params, case("div_val_2")[1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": "pt"}, "'pt' in its metadata, not 'txl_jax 1': give a file"),
        ({"format": None}, "'' in its metadata, not"),
        ({"vocab": None}, r"is damaged \('vocab'\)"),
        ({"manifest": "[1]"}, "is damaged"),
    ],
)
def test_another_file_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with safetensors.safe_open(model, "numpy") as file:
        metadata = {**file.metadata(), **changes}
    metadata = {name: text for name, text in metadata.items() if text is not None}
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(model), other, metadata)
    with pytest.raises(UserError, match=message):
        txl_jax.load(other)


def test_damage_is_noticed(model: Path, tmp_path: Path) -> None:
    """A weight's flipped bit, a truncated file, and a folder instead of the file."""
    data = bytearray(model.read_bytes())
    data[-10] ^= 4
    (tmp_path / "flipped").write_bytes(data)
    (tmp_path / "short").write_bytes(data[:-10])
    (tmp_path / "text").write_text("weights")
    for name, message in (
        ("flipped", "array params/.* wrong checksum"),
        ("short", "is damaged"),
        ("text", "is damaged"),
    ):
        with pytest.raises(UserError, match=message):
            read_release(tmp_path / name)
        done = imported(tmp_path / name, tmp_path / "run")
        assert (done.status, done.out) == (2, "")
        assert len(done.err.splitlines()) == 1 and "copy it again" in done.err
    assert not (tmp_path / "run").exists()
    done = imported(tmp_path, tmp_path / "run")
    assert (done.status, done.out) == (2, "")
    assert "is not a file: give one that --mode=export" in done.err
    with pytest.raises(UserError, match="missing.safetensors holds no run"):
        txl_jax.load(tmp_path / "missing.safetensors")


FORGED: list[dict[str, Any]] = [
    {"step": "3"},
    {"step": 1.5},
    {"step": None},
    {"step": 2**80},
    {"arrays": {"params/" + "a/" * 9000: ["float32", [1], "0" * 16]}},
]


@pytest.mark.parametrize("change", FORGED, ids=str)
def test_a_forged_manifest_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    with safetensors.safe_open(model, framework="numpy") as file:
        texts = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "arrays" in change:
        arrays = {"a/" * 9000: np.zeros(1, np.float32)}
    body = json.loads(texts["manifest"]) | change
    del body["sha256"]
    body["sha256"] = manifest._sha256(body)
    file = tmp_path / "file.safetensors"
    texts = {**texts, "manifest": json.dumps(body)}
    file.write_bytes(safetensors.numpy.save(arrays, texts))
    # Deep trees are an error for some versions of Python and jax.
    with refused("is damaged|do not fit its config"):
        txl_jax.load(file)


def test_a_model_that_does_not_fit_its_config(model: Path, tmp_path: Path) -> None:
    found = read_release(model)
    found.config["model"]["d_inner"] = 48
    save_release(found, tmp_path / "wide")
    with pytest.raises(UserError, match="feed_forward/.* do not fit its config"):
        txl_jax.load(tmp_path / "wide")
    found = read_release(model)
    found.params["layers"]["attention"]["q"][0, 0] = np.nan
    save_release(found, tmp_path / "nan")
    with pytest.raises(BadNumbers, match="layers/attention/q in .* is not finite"):
        txl_jax.load(tmp_path / "nan")


@pytest.mark.parametrize("change", [("rotary", True), ("norm", "new"), ("n_head", "2")])
def test_another_version(model: Path, tmp_path: Path, change: tuple[str, Any]) -> None:
    found = read_release(model)
    found.config["model"][change[0]] = change[1]
    save_release(found, tmp_path / "newer")
    with pytest.raises(UserError, match=f"{tmp_path}/newer .* use the version that"):
        txl_jax.load(tmp_path / "newer")
    done = imported(tmp_path / "newer", tmp_path / "run")
    assert done.status == 2 and found.origin["git_revision"] in done.err
    origins: list[Any] = [found.origin, {}, [], 3]
    for origin in origins:
        other = found._replace(config={"data": None}, origin=origin)
        save_release(other, tmp_path / "newer")
        with pytest.raises(UserError, match="use the version that exported it"):
            txl_jax.load(tmp_path / "newer")


def test_fields_that_are_gone_are_left_out(model: Path, tmp_path: Path) -> None:
    """They are options of a mode, and a part of the model that was turned off."""
    found = read_release(model)
    found.config["generate"]["fast"] = found.config["old"] = {"depth": 3}
    found.config["model"]["depth"] = 0
    save_release(found, tmp_path / "older")
    assert txl_jax.load(tmp_path / "older").config == txl_jax.load(model).config


def test_half_of_the_bytes_hold_rounded_numbers(
    home: Home, model: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.safetensors"
    flags = ("--format=txl_jax", "--dtype=float16", f"--target={half}")
    assert home.read("export", *flags).status == 0
    with safetensors.safe_open(half, framework="numpy") as file:
        kinds = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kinds == {np.dtype(np.float16)}
    exact, rounded = (txl_jax.load(path).params for path in (model, half))
    expected = jax.tree.map(lambda x: np.float32(np.float16(x)), jax.device_get(exact))
    assert_equal(rounded, expected)


def test_a_file_is_read_in_place_of_a_workdir(
    home: Home, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--split=valid", "--max_tokens=200")
    data = [f"--config.data.path={home.path / 'text.txt'}"]
    data += [f"--config.data.data_dir={home.path / 'data'}"]
    done = command("evaluate", f"--model={model}", *data, *flags)
    assert done.result["nll"] == home.read("evaluate", *flags).result["nll"]
    swept = command("evaluate", f"--model={model}", *data, *flags, "--sweep=mem_len=8")
    assert swept.result["file"] == "runs/tiny/sweep_mem_len.json"
    for argv, error in (
        (["train", f"--model={model}"], "--model is for the modes evaluate, generate,"),
        (["score", "--model=shakespear"], "did you mean 'shakespeare'?"),
        (["score", f"--model={home.path / 'tiny.py'}"], "is not a model in one file"),
        (["score", f"--model={model}", "--config=wt103"], "has its own config, and"),
        (
            ["score", f"--model={model}", "--config.eval.checkpoint=latest"],
            "own config",
        ),
    ):
        failed = command(*argv)
        assert failed.status == 2 and error in failed.err


def test_local_settings_are_not_exported(home: Home, tmp_path: Path) -> None:
    """Such as devices, the chosen checkpoint, and sources of imports."""
    local = "--config.mesh.data=8", "--config.eval.checkpoint=latest"
    first = f"--target={tmp_path / 'one'}", *local
    assert home.read("export", "--format=txl_jax", *first).status == 0
    assert str(home.path).encode() not in (tmp_path / "one").read_bytes()
    found, run = read_release(tmp_path / "one"), home.run / "run.json"
    (start,) = json.loads(run.read_text())["starts"]
    for name in ("git_revision", "versions", "device_kind"):
        assert found.origin[name] == start[name]
    config, default = found.config, configs.default()
    assert config["mesh"] == default.mesh.to_dict()
    assert config["eval"]["checkpoint"] == default.eval.checkpoint
    assert imported(tmp_path / "one", tmp_path / "run").status == 0
    flags = (f"--workdir={tmp_path / 'run'}", f"--target={tmp_path / 'two'}")
    assert command("--mode=export", "--format=txl_jax", *flags).status == 0
    assert str(tmp_path).encode() not in (tmp_path / "two").read_bytes()
    assert list(read_release(tmp_path / "two").origin["imported"]["sha256"]) == ["one"]


def test_bad_flags_are_one_line(home: Home, model: Path, tmp_path: Path) -> None:
    done = imported(model, tmp_path / "run", "--config.model.pre_lnorm=true")
    assert done.status == 2 and "model was trained with another value" in done.err
    vocab = f"--config.data.vocab_path={home.run / 'vocab.json'}"
    done = imported(model, tmp_path / "run", vocab)
    assert done.status == 2 and "contains its vocabulary" in done.err
    done = command("--mode=evaluate", f"--workdir={model}")
    assert done.status == 2 and "give it as --model" in done.err
    assert os.listdir(tmp_path) == []
