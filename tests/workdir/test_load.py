"""A trained run can be loaded, and another run can start from its parameters."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refusal
from txl_jax import config as configs
from txl_jax.checkpoint import save_restore
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.streams import Position
from txl_jax.data.vocab import CharVocab
from txl_jax.data.word import WordVocab
from txl_jax.evaluate.options import EvalConfig
from txl_jax.fields import Role
from txl_jax.model.config import ModelConfig
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import like_params
from txl_jax.workdir import load as restore

VOCAB = CharVocab("abcdefghijkl")
OTHER_VOCAB = CharVocab("abcdefghijlk")
PARAMS = {seed: tiny.make_params(seed=seed) for seed in range(1, 5)}
BEST, NEWEST = 10, 20
MESH = MeshConfig()


def write_run(
    workdir: Path,
    *,
    asgd_from: int = 0,
    model: ModelConfig = tiny.CONFIG,
    mesh: MeshConfig = MESH,
    params: dict[int, Any] = PARAMS,
) -> Path:
    """Writes a workdir with two checkpoints, without an optimizer state.

    PARAMS[1] are the best and PARAMS[2] the newest; with an average, 3 and 4.
    """
    workdir.mkdir()
    # As in a saved run: the size comes from the vocabulary.
    model = dataclasses.replace(model, vocab_size=0)
    config = Config(model=model, optim=OptimConfig(asgd_from=asgd_from), mesh=mesh)
    (workdir / "config.json").write_text(json.dumps(configs.to_json(config)))
    vocabulary.save(VOCAB, workdir / "vocab.json")
    with save_restore.Checkpoints(workdir) as manager:
        for number, step in enumerate((BEST, NEWEST), start=1):
            items = {"params": params[number]}
            if asgd_from:
                items["average"] = params[number + 2]
            manager.save_items(step, items, Position(), float(step))
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
    train = TrainConfig(init_from=str(source), batch_size=8)
    return Config(model=tiny.config(**changes), train=train)


def load_initial(config: Config, workdir: Path, vocab: Any) -> Any:
    """Returns the parameters that a run starts from, on its mesh."""
    mesh = make_mesh(config.mesh)
    like = like_params(config.model, mesh)
    return restore.load_initial(config, workdir, vocab, mesh, like)


def refused_start(config: Config, folder: Path, vocab: Any = VOCAB) -> str:
    """Returns the message that refuses such a start: one line."""
    message = refusal(load_initial, config, folder / "new", vocab)
    assert message.startswith(f"train.init_from = {config.train.init_from!r}: ")
    assert not (folder / "new").exists()
    return message


@pytest.mark.parametrize("name, first", [("plain", 1), ("mean", 3)])
def test_the_average_is_loaded(runs: Path, name: str, first: int) -> None:
    """The run's own config decides, not the config of the evaluation."""
    saved = configs.load_json(runs / name / "config.json")
    for which, expected, step in (
        ("best", PARAMS[first], BEST),
        ("latest", PARAMS[first + 1], NEWEST),
    ):
        config = Config(model=saved.model, eval=EvalConfig(checkpoint=which))
        loaded = restore.load(runs / name, config)
        tiny.assert_close(loaded.params, expected)
        assert loaded.step == step


def test_a_fitting_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mesh that the user states is refused, and one that fits is named."""
    run = write_run(tmp_path / "pod", mesh=MeshConfig(data=3, fsdp=4, model=6))
    loaded = restore.load(run)
    line = "mesh (3, 4, 6) does not fit this machine: reading on (-1, 4, 2)"
    assert line in capsys.readouterr().err
    assert dict(loaded.mesh.shape) == {"data": 1, "fsdp": 4, "model": 2}
    tiny.assert_equal(loaded.params, PARAMS[1])
    saved = configs.load_json(run / "config.json")
    stated = dataclasses.replace(saved, mesh=MeshConfig(fsdp=6))
    message = refusal(restore.load, run, stated)
    assert message.endswith("[-1, 6, 1] does not fit 8 devices; set mesh.fsdp=2")


OTHERS: dict[str, Any] = dict(mem_len=7, initial_memory="zeros", clamp_len=3, unroll=2)
OTHERS |= dict(same_length=True, dropout=0.3, dropatt=0.2, variational=True)
OTHERS |= dict(
    word_dropout=0.1,
    outer_dropout=0.2,
    init_std=0.3,
    proj_init_std=0.3,
    norm_init_std=0.3,
)
OTHERS |= dict(dtype="bfloat16", kernel="xla", remat_policy="full")
APART = {"fast_weights"}


@pytest.mark.parametrize("name, seed", [("plain", 1), ("mean", 3)])
def test_a_start_from_a_run(runs: Path, tmp_path: Path, name: str, seed: int) -> None:
    """The mesh and fields that do not matter may differ."""
    free = {x.key for x in ModelConfig.fields() if Role.ARCHITECTURE not in x.roles}
    assert OTHERS.keys() | APART == free
    mesh = MeshConfig(data=1, fsdp=8)
    config = dataclasses.replace(starting_from(runs / name, **OTHERS), mesh=mesh)
    params = load_initial(config, tmp_path / "new", VOCAB)
    tiny.assert_equal(params, PARAMS[seed])
    shard = params["embedding"]["table"].addressable_shards[0].data
    assert np.shape(shard) == (tiny.V, tiny.D // 8) and not (tmp_path / "new").exists()


def test_a_start_from_a_run_without_fast_weights(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are new, and all other parameters come from the run."""
    mesh = MeshConfig(model=2)
    config = dataclasses.replace(starting_from(runs / "plain", **tiny.FAST), mesh=mesh)
    with jax.transfer_guard("disallow"):
        params = load_initial(config, tmp_path / "new", VOCAB)
    fast = params["layers"]["attention"].pop("fast")
    assert (np.asarray(fast["gate"]["bias"]) == -2.0).all()
    tiny.assert_equal(params, PARAMS[1])
    err = capsys.readouterr().err
    assert "layers/attention/fast/gate/bias" in err
    assert err.rstrip().endswith("which the source's model lacks")


def test_no_start_without_source_or_on_resume(runs: Path, tmp_path: Path) -> None:
    assert load_initial(starting_from(""), tmp_path / "new", VOCAB) is None
    resumed = starting_from("/gone")
    assert load_initial(resumed, runs / "plain", VOCAB) is None


MEANING: dict[str, Any] = dict(position="none", untie_r=True, pre_lnorm=True)
MEANING |= dict(layer_norm_epsilon=1e-12, same_length_self=True, cutoffs=(3, 9))
MEANING |= dict(div_val=2, tie_weights=False, tie_projs=(True,), proj_same_dim=False)
MEANING |= dict(d_inner=12)
MEANINGS = [{"n_head": 3, "d_head": 2}, *({name: x} for name, x in MEANING.items())]


@pytest.mark.parametrize("changes", MEANINGS, ids=str)
def test_other_conventions(runs: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """They are refused even if the shapes fit, as most of these do."""
    message = refused_start(starting_from(runs / "plain", **changes), tmp_path)
    for name, new in changes.items():
        old = getattr(tiny.CONFIG, name)
        assert f"model.{name} is {old!r} there, {new!r} here" in message
    assert "config.json" in message


def test_shapes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "odd", model=tiny.config(n_layer=3))
    message = refused_start(starting_from(tmp_path / "odd", n_layer=3), tmp_path)
    assert "model." not in message
    assert "layers/attention/k is float32[2, 2, 3, 8] there, float32[3, 2" in message


def test_another_vocabulary_is_refused_with_its_fix(runs: Path, tmp_path: Path) -> None:
    message = refused_start(starting_from(runs / "plain"), tmp_path, OTHER_VOCAB)
    path = runs / "plain" / "vocab.json"
    assert f"data.vocab_path={str(path)!r}" in message
    # The fix that the message gives works.
    again = vocabulary.read_file(path, WordVocab)
    assert again.to_json() == VOCAB.to_json()
    config = starting_from(runs / "plain")
    assert load_initial(config, tmp_path / "new", again) is not None
