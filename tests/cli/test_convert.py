"""The mode import, from files to scores and samples."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from tests import reference
from tests.cli.test_main import documented
from tests.convert import recorded
from tests.convert.test_huggingface import VOCAB, folder_of
from tests.convert.test_pickle import RECORDED
from tests.convert.test_pytorch import case
from tests.support import tiny
from tests.support.tiny import assert_equal
from tests.support.trained import Done, command
from txl_jax import config as configs
from txl_jax.convert import tensorflow
from txl_jax.data import vocab as vocabulary
from txl_jax.workdir import load

NAME = "div_val_2"


class Home(NamedTuple):
    """A model of Hugging Face's port, its imported workdir, and the import's result."""

    model: Path
    run: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    path = tmp_path_factory.mktemp("home")
    folder_of(path / "model")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(VOCAB.words[2:], 7)) for _ in range(300)]
    (path / "text.txt").write_text("\n".join(lines) + "\n")
    data = {"corpus": "text", "path": path / "text.txt", "data_dir": path / "data"}
    flags = [f"--config.data.{name}={value}" for name, value in data.items()]
    for name in ("run", "walk"):  # left by killed imports
        (path / f".incomplete-{name}" / "checkpoints").mkdir(parents=True)
    done = imported(path / "model", path / "run", *flags)
    assert documented("import", done.result)
    return Home(path / "model", path / "run", done.result)


def imported(
    source: Path, workdir: Path, *flags: str, format: str = "huggingface"
) -> Done:
    common = (f"--format={format}", f"--source={source}", f"--workdir={workdir}")
    return command("--mode=import", *common, *flags)


def test_the_workdir_holds_the_model(home: Home) -> None:
    config, params = case(NAME)
    assert sorted(path.name for path in home.run.iterdir()) == [
        *("checkpoints", "config.json", "run.json", "vocab.json")
    ]
    left = [path.name for path in home.run.parent.glob(".incomplete*")]
    assert left == [".incomplete-walk"], "of another workdir"
    assert_equal(load.load(home.run).params, params)
    saved = configs.load_json(home.run / "config.json")
    assert saved.model == config
    assert (saved.eval.mem_len, saved.eval.clamp_len) == (7, 5)
    assert saved.eval.same_length
    assert (saved.generate.mem_len, saved.generate.prompt) == (7, "\n")
    assert saved.convert == configs.Config().convert
    assert saved.data.vocab_path == str(home.run / "vocab.json")
    assert vocabulary.load(home.run / "vocab.json").to_json() == VOCAB.to_json()
    same = ("mode", "format", "step", "vocab", "types")
    expected = ["import", "huggingface", 1, "word", 37]
    assert [home.result[name] for name in same] == expected
    origin = json.loads((home.run / "run.json").read_text())["imported"]
    names = ["config.json", "model.safetensors", "vocab.txt"]
    assert list(origin["sha256"]) == [str(home.model / name) for name in names]
    assert origin["sha256"] == home.result["sha256"]
    assert all(len(checksum) == 64 for checksum in origin["sha256"].values())


def test_evaluation_scores_the_text(home: Home) -> None:
    """The oracle gives the same nll, from the port's memory of zeros."""
    flags = ("--streams=8", "--tgt_len=5", "--max_tokens=80", "--split=valid")
    result = command("--mode=evaluate", f"--workdir={home.run}", *flags).result
    assert (result["step"], result["mem_len"], result["clamp_len"]) == (1, 7, 5)
    config, params = case(NAME)
    settings = tiny.reference_settings(config)
    tokens = np.fromfile(next(home.run.parent.rglob("valid.bin")), np.uint8)
    x_BT, y_BT = (tokens[i : i + 80].reshape(8, 10).astype(int) for i in (0, 1))
    memory, nll = reference.zeros(config.n_layer, 8, config.d_model, config.mem_len), []
    for x_BL, y_BL in zip(np.split(x_BT, 2, 1), np.split(y_BT, 2, 1), strict=True):
        nll_BL, memory = reference.nll(params, x_BL, y_BL, memory, **settings)
        nll.append(nll_BL)
    assert result["tokens"] == 80
    assert result["nll"] == pytest.approx(np.mean(nll), rel=1e-5)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = folder_of(tmp_path / "model") / "model.safetensors"
    state = safetensors.numpy.load_file(weights)
    state["transformer.layers.0.pos_ff.CoreNet.3.bias"][2] = np.inf
    safetensors.numpy.save_file(state, weights)
    done = imported(tmp_path / "model", tmp_path / "run")
    assert (done.status, done.out) == (2, "")
    assert "parameter layers/feed_forward/out/bias is not finite" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_overrides_and_a_vocabulary_of_characters(home: Home, tmp_path: Path) -> None:
    letters = "_abcdefghijklmnopqrstuvwxyz0123456789"
    (tmp_path / "letters.txt").write_text("\n".join(letters))
    fields = ("--config.eval.mem_len=3", "--config.model.dropout=0.5")
    flags = (f"--config.data.vocab_path={tmp_path / 'letters.txt'}", *fields)
    done = imported(home.model, tmp_path / "run", *flags)
    assert done.result["vocab"] == "char"
    saved = configs.load_json(tmp_path / "run" / "config.json")
    assert saved.generate.prompt == " "
    assert (saved.eval.mem_len, saved.eval.clamp_len) == (3, 5)
    assert (saved.model.dropout, saved.model.mem_len) == (0.5, 7)


def test_importing_the_original_pytorch_code_and_nvidias(tmp_path: Path) -> None:
    """One is a module beside a corpus cache, the other a checkpoint with its sizes."""
    for name, source in {
        "pytorch/model.pt": "div_val_2_all_tied.module.stream.pt",
        "pytorch/cache.pkl": "cache2.pkl",
        "nvidia/checkpoint_best.pt": "nvidia.pt",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RECORDED / source, tmp_path / name)
    flags = ["--config.model.mem_len=2", "--config.model.same_length"]
    flags += ["--config.model.clamp_len=3", "--config.model.cutoffs=9,17,28"]
    for kind, fields, saved, step in (
        ("pytorch", flags, "div_val_2_all_tied", 1),
        ("nvidia", [], recorded.NVIDIA, 40),
    ):
        run = tmp_path / f"{kind}_run"
        assert imported(tmp_path / kind, run, *fields, format=kind).status == 0
        loaded = load.load(run)
        assert_equal(loaded.params, case(saved)[1])
        model = loaded.config.model
        assert model.initial_memory == "empty" and loaded.step == step
        assert model.same_length and model.same_length_self == (kind == "nvidia")
        assert kind == "nvidia" or (model.mem_len, model.clamp_len) == (2, 3)


def test_importing_the_original_tensorflow_code(tmp_path: Path) -> None:
    source = RECORDED.parent / "tensorflow_checkpoints" / "wt103"
    shutil.copytree(source, tmp_path / "model")
    config, params, step = tensorflow.read_checkpoint(
        source, mem_len=3, same_length=True
    )
    lines = ["<eos>", *(f"w{i}" for i in range(1, config.vocab_size))]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vocab.txt").write_text("\n".join(lines))
    prefix, run = tmp_path / "model" / "ckpt-0", tmp_path / "run"
    flags = ("--config.model.mem_len=3", "--config.model.same_length")
    done = imported(prefix, run, *flags, format="tensorflow")
    assert done.result["step"] == max(step, 1)
    assert [Path(path).name for path in done.result["sha256"]] == [
        *("ckpt-0.data-00000-of-00001", "ckpt-0.index", "vocab.txt")
    ]
    loaded = load.load(run)
    assert loaded.config.model == config
    assert_equal(loaded.params, params)
