"""A checkpoint is restored bit for bit, and the newest and the best are kept.

Dims: N layers, B streams, M memory, D model.
"""

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.model.memory import Memory
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import letters, make_mesh, shardings
from txl_jax.update.guard import Guard
from txl_jax.update.optim import make_optimizer
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import Average, TrainState

# Step and valid nll: it rises after step 2, and step 4 was not validated.
RISING = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5, 6: 4.0}


def make_state(seed: int, mem_len: int = 3, averages: bool = False) -> TrainState:
    """Returns a state with no two numbers alike, its memory over eight devices."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return rng.normal(scale=100, size=shape).astype(dtype)

    params = {"a": draw((8, 3)), "layers": {"b": draw((2, 5), jnp.bfloat16)}}
    opt_state = make_optimizer(OptimConfig()).init(params)
    opt_state = jax.tree.map(lambda x: draw(x.shape, x.dtype), opt_state)
    memory = Memory(
        h_NBMD=draw((2, 8, mem_len, 4), jnp.bfloat16),
        filled_B=draw((8,), np.int32),
    )
    step = jnp.asarray(seed, jnp.int32)
    state = TrainState(step, params, opt_state, memory, jax.random.key(seed))
    made, skipped = (jnp.asarray(seed + n, jnp.int32) for n in (2000, 3000))
    state = dataclasses.replace(state, guard=Guard(draw(()), made, skipped))
    if averages:
        average = jax.tree.map(lambda x: draw(x.shape, x.dtype), params)
        count = jnp.asarray(seed + 1000, jnp.int32)
        state = dataclasses.replace(state, average=Average(average, count))
    replicated = jax.tree.map(lambda _: PartitionSpec(), state)
    specs = dataclasses.replace(replicated, memory=letters(memory))
    return jax.device_put(state, shardings(make_mesh(MeshConfig()), specs))


def like(state: Any) -> Any:
    places = jax.tree.map(lambda x: x.sharding, state)
    return save_restore.abstract(jax.eval_shape(lambda: state), places)


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


def save_all(
    workdir: Path,
    nll_by_step: dict[int, Any],
    config: CheckpointConfig,
    averages: bool = False,
) -> None:
    with closing(open_checkpoints(workdir, config)) as manager:
        for step, valid_nll in nll_by_step.items():
            position = Position(epoch=step, segment=2, token_offset=2**40 + step)
            state = make_state(step, averages=averages)
            save_restore.save(manager, step, state, position, valid_nll)


@pytest.fixture(scope="module")
def rising(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what CheckpointConfig(keep=2) keeps of RISING: not to be changed."""
    workdir = tmp_path_factory.mktemp("rising")
    save_all(workdir, RISING, CheckpointConfig(keep=2))
    return workdir


@pytest.fixture
def copied(rising: Path, tmp_path: Path) -> Path:
    """Holds a copy of `rising` to be damaged."""
    shutil.copytree(rising, tmp_path / "run")
    return tmp_path / "run"


def steps(workdir: Path) -> list[int]:
    config = CheckpointConfig(keep=2)
    with closing(open_checkpoints(workdir, config, read_only=True)) as manager:
        return sorted(manager.all_steps())


def restored_step(workdir: Path, which: str) -> int:
    """Returns the step of the checkpoint `which`, after a check of its parameters."""
    config = CheckpointConfig(keep=2)
    params = make_state(0).params
    with closing(open_checkpoints(workdir, config, read_only=True)) as manager:
        got, step = save_restore.restore_params(manager, which, like(params))
    assert_same(got, make_state(step).params)
    return step


def test_a_state_without_memory_is_restored_exactly(tmp_path: Path) -> None:
    expected = make_state(1, mem_len=0)
    with closing(open_checkpoints(tmp_path, CheckpointConfig())) as manager:
        save_restore.save(manager, 1, expected, Position(0, 1, 2), None)
        restored = save_restore.restore(manager, like(expected))
    assert restored is not None
    assert_same(restored.state, expected)


def test_state_and_position_are_restored_exactly(rising: Path) -> None:
    expected = make_state(6)
    with closing(open_checkpoints(rising, CheckpointConfig(keep=2))) as manager:
        restored = save_restore.restore(manager, like(make_state(0)))
    assert restored is not None
    step, state, position = restored
    assert step == 6
    assert_same(state, expected)
    assert isinstance(state, TrainState)
    assert jnp.issubdtype(state.rng.dtype, jax.dtypes.prng_key)
    assert state.memory.h_NBMD.dtype == jnp.bfloat16
    assert position == Position(epoch=6, segment=2, token_offset=2**40 + 6)
    assert [type(number) for number in position] == [int] * 3


def test_averaged_parameters_are_restored_exactly(tmp_path: Path) -> None:
    save_all(tmp_path, {1: 2.0}, CheckpointConfig(), averages=True)
    expected = make_state(1, averages=True)
    with closing(open_checkpoints(tmp_path, CheckpointConfig())) as manager:
        restored = save_restore.restore(manager, like(make_state(0, averages=True)))
        params = like(expected.params)
        mean, step = save_restore.restore_params(manager, "best", params, averages=True)
        own, _ = save_restore.restore_params(manager, "best", params)
    assert restored is not None and step == 1
    assert_same(restored.state, expected)
    assert isinstance(restored.state.average, Average)
    assert_same(mean, expected.average.params)
    assert_same(own, expected.params)


def test_without_an_average_a_checkpoint_has_no_item_for_it(
    rising: Path,
) -> None:
    items = {path.name for path in (rising / "checkpoints" / "6").iterdir()}
    assert {"params", "training", "record"} <= items
    assert "average" not in items
    saved = ocp.StandardCheckpointHandler().metadata(
        rising / "checkpoints" / "6" / "training"
    )
    assert set(saved.tree) == {"step", "opt_state", "memory", "rng", "guard"}


def test_nothing_is_restored_from_nothing(tmp_path: Path) -> None:
    with closing(open_checkpoints(tmp_path, CheckpointConfig())) as manager:
        assert save_restore.restore(manager, like(make_state(0))) is None


def test_the_newest_and_the_best_are_kept_when_the_loss_rises(rising: Path) -> None:
    assert steps(rising) == [2, 5, 6]


def test_retention_follows_the_config_of_the_resumed_run(copied: Path) -> None:
    save_all(copied, {7: 5.0}, CheckpointConfig(keep=1))
    assert steps(copied) == [2, 7]
    save_all(copied, {8: 0.5}, CheckpointConfig(keep=1))
    assert steps(copied) == [8], "a new best lets the old one go"


@pytest.mark.parametrize("which, step", [("best", 2), ("latest", 6), ("5", 5)])
def test_parameters_alone_are_restored_by_name(
    rising: Path, which: str, step: int
) -> None:
    assert restored_step(rising, which) == step


@pytest.mark.parametrize(
    "which, wanted",
    [
        ("average", [2, 5, 6]),
        ("6,2", [2, 6]),
        ("2, 5", [2, 5]),
        ("5,5", [5]),
    ],
)
def test_parameters_of_several_checkpoints_are_averaged(
    rising: Path, which: str, wanted: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    config, params = CheckpointConfig(keep=2), make_state(0).params
    with closing(open_checkpoints(rising, config, read_only=True)) as manager:
        got, step = save_restore.restore_params(manager, which, like(params))
    assert step == wanted[-1]
    each = [np.asarray(make_state(step).params["a"]) for step in wanted]
    np.testing.assert_allclose(got["a"], np.mean(each, axis=0), rtol=1e-5)
    assert (got["a"].dtype, got["a"].sharding) == (np.float32, params["a"].sharding)
    named = ", ".join(map(str, wanted))
    output = f"averaging checkpoints {named}\n" if len(wanted) > 1 else ""
    assert capsys.readouterr().err == output


@pytest.mark.parametrize(
    "which", ["3", "7", "newest", "", "-1", "5,7", "5,", "5,best", "5-6"]
)
def test_a_missing_checkpoint_is_refused(rising: Path, which: str) -> None:
    with pytest.raises(UserError) as caught:
        restored_step(rising, which)
    assert f"eval.checkpoint = {which!r}" in str(caught.value)
    assert "2, 5, 6" in str(caught.value)


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no checkpoint in {tmp_path}/checkpoints"):
        restored_step(tmp_path, "best")
    assert not list(tmp_path.iterdir()), "reading creates nothing"


def test_the_best_is_the_newest_while_nothing_was_validated(tmp_path: Path) -> None:
    save_all(tmp_path, {1: None, 2: None}, CheckpointConfig(keep=2))
    assert restored_step(tmp_path, "best") == 2


def test_a_nan_loss_is_never_the_best(tmp_path: Path) -> None:
    save_all(tmp_path, {1: 2.0, 2: float("nan")}, CheckpointConfig(keep=1))
    assert restored_step(tmp_path, "best") == 1


def test_reading_changes_nothing(rising: Path) -> None:
    def contents() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in rising.rglob("*")}

    before = contents()
    restored_step(rising, "best")
    assert contents() == before


def test_resuming_deletes_what_a_kill_left(copied: Path, rising: Path) -> None:
    """Otherwise the average of all kept would depend on the kill."""
    folder = copied / "checkpoints"
    with closing(open_checkpoints(copied, CheckpointConfig(keep=4))) as manager:
        save_restore.save(manager, 7, make_state(7), Position(7, 2, 3), 5.0)
    assert steps(copied) == [2, 5, 6, 7]
    shutil.copytree(folder / "5", folder / "deleted" / "4")
    with closing(open_checkpoints(copied, CheckpointConfig(keep=2))) as manager:
        restored = save_restore.restore(manager, like(make_state(0)))
    assert restored is not None and restored.step == 7
    assert sorted(path.name for path in folder.iterdir()) == ["2", "6", "7"]
