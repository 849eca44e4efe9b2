"""A trained run can be loaded, and another run can start from its parameters."""

import dataclasses
import gc
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax import config as configs
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import CharVocab
from txl_jax.data.word import Lines
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.workdir import load as restore

VOCAB = CharVocab("abcdefghijkl")
OTHER_VOCAB = CharVocab("abcdefghijlk")
PARAMS = {seed: tiny.make_params(seed=seed) for seed in range(6)}
BEST, NEWEST = 10, 20


def write_run(
    workdir: Path, *, asgd_from: int = 0, model: ModelConfig = tiny.CONFIG
) -> Path:
    """Writes a workdir as an import makes it: two checkpoints without training's state.

    PARAMS[1] are the best and PARAMS[2] the newest; with an average they are 3 and 4.
    """
    workdir.mkdir()
    # As a run saves it: the size comes from the vocabulary.
    model = dataclasses.replace(model, vocab_size=0)
    config = Config(model=model, optim=OptimConfig(asgd_from=asgd_from))
    configs.save_json(config, workdir / "config.json")
    vocabulary.save(VOCAB, workdir / "vocab.json")
    with closing(open_checkpoints(workdir, CheckpointConfig())) as manager:
        for number, step in enumerate((BEST, NEWEST), start=1):
            items = {"params": PARAMS[number]}
            if asgd_from:
                items["average"] = PARAMS[number + 2]
            save_restore.save_items(manager, step, items, None, float(step))
    return workdir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a plain run and one that averages: not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "plain")
    write_run(folder / "mean", asgd_from=1)
    return folder


def starting_from(source: Path | str, **changes: Any) -> Config:
    """Returns the config of a run that starts from the parameters in `source`."""
    how = TrainConfig(init_from=str(source), batch_size=8)
    return Config(model=tiny.config(**changes), train=how)


def refusal(config: Config, folder: Path, vocab: Any = VOCAB) -> str:
    """Returns the message that refuses such a start: one line."""
    with pytest.raises(UserError) as caught:
        restore.load_initial(config, folder / "new", vocab)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"train.init_from = {config.train.init_from!r}: ")
    assert not (folder / "new").exists()
    return message


# Loading


def load(workdir: Path, which: str) -> tuple[Any, int]:
    saved = configs.parse(configs.load_json(workdir / "config.json"))
    how = EvalConfig(checkpoint=which)
    loaded = restore.load(workdir, dataclasses.replace(saved, eval=how))
    return loaded.params, loaded.step


@pytest.mark.parametrize("name, first", [("plain", 1), ("mean", 3)])
def test_a_run_with_an_average_is_loaded_averaged(
    runs: Path, name: str, first: int
) -> None:
    for which, seed, step in (("best", first, BEST), ("latest", first + 1, NEWEST)):
        params, result = load(runs / name, which)
        tiny.assert_equal(params, PARAMS[seed])
        assert result == step
    for which in ("average", f"{BEST},{NEWEST}"):
        params, result = load(runs / name, which)
        mean = [(PARAMS[first], PARAMS[first + 1])]
        tiny.assert_close(params, jax.tree.map(lambda a, b: (a + b) / 2, *mean[0]))
        assert result == NEWEST


def test_the_config_of_an_evaluation_does_not_decide_averaging(
    runs: Path,
) -> None:
    """The config of an evaluation may be another run's."""
    saved = configs.parse(configs.load_json(runs / "mean" / "config.json"))
    plain = dataclasses.replace(saved, optim=OptimConfig())
    tiny.assert_equal(restore.load(runs / "mean", plain).params, PARAMS[3])


# Starting from the parameters of another run


@pytest.mark.parametrize("name, seed", [("plain", 1), ("mean", 3)])
def test_a_run_starts_from_the_best_of_another(
    runs: Path, tmp_path: Path, name: str, seed: int
) -> None:
    config = starting_from(runs / name)
    params = restore.load_initial(config, tmp_path / "new", VOCAB)
    tiny.assert_equal(params, PARAMS[seed])
    assert not (tmp_path / "new").exists()


def test_without_init_from_a_run_starts_at_random(tmp_path: Path) -> None:
    assert restore.load_initial(starting_from(""), tmp_path / "new", VOCAB) is None


def test_a_resumed_run_ignores_init_from(runs: Path) -> None:
    config = starting_from("/gone")
    assert restore.load_initial(config, runs / "plain", VOCAB) is None


OTHERS: dict[str, Any] = {
    "mem_len": 7,
    "initial_memory": "zeros",
    "clamp_len": 3,
    "same_length": True,
    "dropout": 0.3,
    "dropatt": 0.2,
    "variational": True,
    "word_dropout": 0.1,
    "init_std": 0.3,
    "proj_init_std": 0.3,
    "norm_init_std": 0.3,
    "dtype": "bfloat16",
    "kernel": "xla",
    "remat_policy": "full",
    "unroll": 2,
}


def test_fields_that_keep_the_meaning_of_parameters_are_free(
    runs: Path, tmp_path: Path
) -> None:
    assert set(OTHERS) == set(restore.FREE)
    config = starting_from(runs / "plain", **OTHERS)
    params = restore.load_initial(config, tmp_path / "new", VOCAB)
    tiny.assert_equal(params, PARAMS[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 3, "d_head": 2},
        {"position": "none"},
        {"untie_r": True},
        {"pre_lnorm": True},
        {"layer_norm_epsilon": 1e-12},
        {"same_length_self": True},
        {"cutoffs": (3, 9)},
        {"div_val": 2},
        {"tie_weights": False},
        {"tie_projs": (True,)},
        {"proj_same_dim": False},
    ],
    ids=str,
)
def test_another_meaning_of_parameters_is_refused(
    runs: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Even where the shapes fit, as they do for most of these."""
    message = refusal(starting_from(runs / "plain", **changes), tmp_path)
    for name, new in changes.items():
        old = getattr(tiny.CONFIG, name)
        assert f"model.{name} is {old!r} there, {new!r} here" in message


def test_a_parameter_that_does_not_fit_is_named(runs: Path, tmp_path: Path) -> None:
    message = refusal(starting_from(runs / "plain", d_inner=12), tmp_path)
    assert "model.d_inner is 10 there, 12 here" in message
    leaf = "layers/feed_forward/in/bias is (2, 10) there, (2, 12) here"
    assert f"parameter {leaf}" in message
    assert "config.json" in message


def test_shapes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "odd", model=tiny.config(n_layer=3))
    message = refusal(starting_from(tmp_path / "odd", n_layer=3), tmp_path)
    assert "model." not in message
    assert "parameter layers/attention/k is (2, 2, 3, 8) there, (3, 2" in message


def test_another_vocabulary_is_refused_with_its_fix(runs: Path, tmp_path: Path) -> None:
    message = refusal(starting_from(runs / "plain"), tmp_path, OTHER_VOCAB)
    path = runs / "plain" / "vocab.json"
    assert f"data.vocab_path={str(path)!r}" in message
    # The fix that the message gives works.
    again = vocabulary.read(path, Lines)
    assert again.to_json() == VOCAB.to_json()
    config = starting_from(runs / "plain")
    assert restore.load_initial(config, tmp_path / "new", again) is not None


def damage(workdir: Path, how: str) -> None:
    step = workdir / "checkpoints" / str(BEST)
    if how == "no data":
        shutil.rmtree(step / "params" / "d", ignore_errors=True)
        shutil.rmtree(step / "params" / "ocdbt.process_0")
    elif how == "half the data":
        for path in (step / "params").rglob("*"):
            if path.is_file() and path.parent.name == "d":
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "no item":
        shutil.rmtree(step / "params")
    elif how == "no checkpoints":
        shutil.rmtree(workdir / "checkpoints")
    elif how == "no vocabulary":
        (workdir / "vocab.json").unlink()
    else:
        (workdir / "config.json").write_text("{")


@pytest.mark.parametrize(
    "how, reason",
    [
        ("no data", f"checkpoint {BEST} is damaged"),
        ("half the data", f"checkpoint {BEST} is damaged"),
        ("no item", f"checkpoint {BEST} is damaged"),
        ("no checkpoints", "no checkpoint in"),
        ("no vocabulary", "is not a vocabulary"),
        ("bad config", "cannot read"),
    ],
)
def test_a_damaged_source_is_one_line(
    runs: Path, tmp_path: Path, how: str, reason: str
) -> None:
    shutil.copytree(runs / "plain", tmp_path / "run")
    damage(tmp_path / "run", how)
    assert reason in refusal(starting_from(tmp_path / "run"), tmp_path)
    gc.collect()


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "holds no run" in refusal(starting_from("/no/such/run"), tmp_path)


def test_parameters_are_placed_on_the_mesh_of_the_new_run(
    runs: Path, tmp_path: Path
) -> None:
    """The mesh of the source does not matter."""
    mesh = configs.MeshConfig(data=1, fsdp=8)
    config = dataclasses.replace(starting_from(runs / "plain"), mesh=mesh)
    params = restore.load_initial(config, tmp_path / "new", VOCAB)
    shard = params["embedding"]["table"].addressable_shards[0].data
    assert np.shape(shard) == (tiny.V, tiny.D // 8)
