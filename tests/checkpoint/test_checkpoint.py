"""A checkpoint is restored bit for bit, and the newest and the best are kept.

Dims: N layers, B streams, M memory, D model.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from txl_jax.checkpoint import save_restore
from txl_jax.data.streams import Position
from txl_jax.model.memory import Memory
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import abstract, letters, shardings
from txl_jax.update.optim import make_optimizer
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import Average, TrainState

# Validation nll by step: it rises after step 2, and step 4 was not validated.
RISING = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5, 6: 4.0}


def make_state(seed: int, mem_len: int = 3, averages: bool = False) -> TrainState:
    """Returns a state without equal numbers, and its memory over eight devices."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return rng.normal(scale=100, size=shape).astype(dtype)

    params = {"a": draw((8, 3)), "layers": {"b": draw((2, 5), jnp.bfloat16)}}
    opt_state = make_optimizer(OptimConfig()).init(params)
    opt_state = jax.tree.map(lambda x: draw(x.shape, x.dtype), opt_state)
    memory = Memory(
        h_NBMD=draw((2, 8, mem_len, 4), jnp.bfloat16), filled_B=draw((8,), np.int32)
    )
    step = jnp.asarray(seed, jnp.int32)
    state = TrainState(step, params, opt_state, memory, jax.random.key(seed))
    skipped = jnp.asarray(seed + 2000, jnp.int32)
    state = dataclasses.replace(state, skipped_in_row=skipped)
    if averages:
        average = jax.tree.map(lambda x: draw(x.shape, x.dtype), params)
        count = jnp.asarray(seed + 1000, jnp.int32)
        state = dataclasses.replace(state, average=Average(average, count))
    replicated = jax.tree.map(lambda _: PartitionSpec(), state)
    specs = dataclasses.replace(replicated, memory=letters(memory))
    return jax.device_put(state, shardings(make_mesh(MeshConfig()), specs))


def like(state: Any) -> Any:
    places = jax.tree.map(lambda x: x.sharding, state)
    return abstract(jax.eval_shape(lambda: state), places)


def assert_same(got: Any, expected: Any) -> None:
    """Compares structure, dtypes, places and bits."""
    tree: Any = jax.tree.structure(got)
    assert tree == jax.tree.structure(expected)
    leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    for left, right in zip(*leaves, strict=True):
        assert (left.dtype, left.sharding) == (right.dtype, right.sharding)
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def save_all(workdir: Path, nll_by_step: dict[int, Any], keep: int) -> None:
    with save_restore.Checkpoints(workdir, keep=keep) as manager:
        for step, valid_nll in nll_by_step.items():
            position = Position(epoch=step, segment=2, token_offset=2**40 + step)
            manager.save(step, make_state(step), position, valid_nll)


@pytest.fixture(scope="module")
def rising(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoints of RISING that keep=2 keeps: not to be changed."""
    workdir = tmp_path_factory.mktemp("rising")
    save_all(workdir, RISING, keep=2)
    return workdir


@pytest.fixture
def copied(rising: Path, tmp_path: Path) -> Path:
    """Holds a copy of `rising` to be damaged."""
    shutil.copytree(rising, tmp_path / "run")
    return tmp_path / "run"


def steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def read_params(workdir: Path, which: str) -> tuple[Any, int]:
    return save_restore.restore_params(workdir, which, like(make_state(0).params))


def test_state_and_position_are_restored_exactly(rising: Path) -> None:
    with save_restore.Checkpoints(rising, keep=2) as manager:
        restored = manager.restore(like(make_state(0)))
    assert restored is not None and restored.step == 6
    assert_same(restored.state, make_state(6))
    assert restored.position == Position(epoch=6, segment=2, token_offset=2**40 + 6)
    assert [type(number) for number in restored.position] == [int] * 3
    newest = rising / "checkpoints" / "6"
    items = {path.name for path in newest.iterdir() if path.is_dir()}
    assert items == {"params", "training", "record"}, "no average"
    saved = ocp.StandardCheckpointHandler().metadata(newest / "training")
    assert set(saved.tree) == {"step", "opt_state", "memory", "rng", "skipped_in_row"}


def test_an_average_without_memory_is_restored_exactly(tmp_path: Path) -> None:
    expected = make_state(1, mem_len=0, averages=True)
    with save_restore.Checkpoints(tmp_path) as manager:
        assert manager.restore(like(expected)) is None, "nothing yet"
        manager.save(1, expected, Position(0, 1, 2), 2.0)
        restored = manager.restore(like(expected))
        average = expected.average.params
        got, _ = save_restore.restore_params(tmp_path, "best", like(average))
        assert_same(got, average)
    assert restored is not None
    assert_same(restored.state, expected)


def test_the_newest_and_the_best_are_kept_when_the_loss_rises(copied: Path) -> None:
    """The config of the resumed run states how many."""
    assert steps(copied) == [2, 5, 6]
    save_all(copied, {7: 5.0}, keep=1)
    assert steps(copied) == [2, 7]
    save_all(copied, {8: 0.5}, keep=1)
    assert steps(copied) == [8], "a new best lets the old one go"


def test_a_later_validation_ranks_a_saved_step(copied: Path) -> None:
    """Only the manifest changes, so that no kill loses the checkpoint."""
    arrays = [x for x in (copied / "checkpoints" / "6").rglob("*") if x.is_file()]
    before = {x: x.stat().st_mtime_ns for x in arrays if "record" not in x.parts}
    save_all(copied, {6: 0.1}, keep=2)
    assert {x: x.stat().st_mtime_ns for x in before} == before
    assert read_params(copied, "best")[1] == 6
    save_all(copied, {6: None}, keep=2)
    assert steps(copied) == [2, 5, 6] and read_params(copied, "best")[1] == 6


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("latest", 6), ("5", 5)])
def test_parameters_alone_are_restored_by_name(
    rising: Path, which: str, step: int
) -> None:
    """Reading changes no file."""
    before = {path: path.stat().st_mtime_ns for path in rising.rglob("*")}
    got, found = read_params(rising, which)
    assert {path: path.stat().st_mtime_ns for path in rising.rglob("*")} == before
    assert found == step
    assert_same(got, make_state(step).params)


@pytest.mark.parametrize(
    ("nll_by_step", "best"), [({1: None, 2: None}, 2), ({1: 2.0, 2: float("nan")}, 1)]
)
def test_without_validation_the_newest_is_the_best(
    tmp_path: Path, nll_by_step: dict[int, Any], best: int
) -> None:
    save_all(tmp_path, nll_by_step, keep=2)
    assert read_params(tmp_path, "best")[1] == best


def test_the_next_save_deletes_leftovers_of_a_kill(copied: Path) -> None:
    folder = copied / "checkpoints"
    save_all(copied, {7: 5.0}, keep=4)
    assert steps(copied) == [2, 5, 6, 7]
    shutil.copytree(folder / "5", folder / "deleted" / "4")
    shutil.copytree(folder / "5", folder / "8.orbax-checkpoint-tmp")
    save_all(copied, {8: 5.0}, keep=2)
    assert steps(copied) == [2, 7, 8]
