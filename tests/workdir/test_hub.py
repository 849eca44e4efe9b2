"""Models in the layout of Hugging Face's hub: exported, loaded, imported, refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import txl_jax
from tests.convert.test_huggingface import folder_of
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import Home, command, home
from txl_jax.convert import huggingface

FIXTURES = (home,)


@pytest.fixture(scope="module")
def folder(home: Home) -> Path:
    """Returns the exported folder of the trained run."""
    path = home.path / "hub"
    done = home.read("export", "--format=hub", f"--target={path}")
    names = ["README.md", "config.json", "model.safetensors", "vocab.json"]
    assert [Path(name).name for name in done.result["sha256"]] == names
    return path


def test_a_folder_loads_like_its_run(home: Home, folder: Path, tmp_path: Path) -> None:
    run = txl_jax.load(home.run)
    for path in (folder, folder / "model.safetensors"):
        loaded = txl_jax.load(path)
        tiny.assert_equal(loaded.params, run.params)
        assert loaded.config.model == run.config.model and loaded.step == run.step
        assert loaded.vocab.to_json() == run.vocab.to_json()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: txl_jax\n") and "2 layers of 16" in card
    assert str(home.path) not in card + (folder / "config.json").read_text()
    sample = home.read("generate").result["text"]
    done = command("generate", f"--model={folder}")
    assert done.result["text"] == sample
    for n, source in enumerate((folder, folder / "model.safetensors")):
        flags = ("--format=txl_jax", f"--source={source}", f"--workdir={tmp_path}/{n}")
        assert command("import", *flags).result["step"] == run.step


def test_a_run_that_was_exported_into_its_own_workdir_loads(
    home: Home, folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(home.run, tmp_path / "run")
    shutil.copy(folder / "model.safetensors", run)
    for path in (run, run / "model.safetensors"):
        tiny.assert_equal(txl_jax.load(path).params, txl_jax.load(home.run).params)


def test_a_folder_that_contradicts_itself_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    before = path.read_text()
    for name, value, line in (
        ("n_layer", 3, "has another n_layer than model.safetensors"),
        ("model_type", "gpt2", "supported are txl_jax and transfo-xl"),
    ):
        path.write_text(json.dumps(json.loads(before) | {name: value}))
        with refused(line):
            txl_jax.load(folder)
    path.write_text(before)


def test_a_folder_of_hugging_face_loads(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "transfo")
    model, params = huggingface.from_pretrained(path)
    loaded = txl_jax.load(path)
    assert loaded.config.model == model
    tiny.assert_equal(loaded.params, params)
    assert loaded.config.eval.mem_len == loaded.config.generate.mem_len == model.mem_len
    assert np.asarray(loaded.vocab.encode("word3")).size
