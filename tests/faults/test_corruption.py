"""Damage to any file of a checkpoint is noticed, or is harmless.

Each file of the newest checkpoint is truncated, changed by a bit, emptied and deleted.
Then either the older checkpoint is restored, with a message, or the state is restored
bit for bit; parameters alone are restored bit for bit or refused.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.checkpoint.test_checkpoint import assert_same, like
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manifest import Damaged
from txl_jax.data.streams import Position
from txl_jax.model.memory import Memory
from txl_jax.update.state import TrainState

pytestmark = pytest.mark.promise("Damage is noticed")

OLDER, NEWER = 5, 6


def make_state(seed: int) -> TrainState:
    """Returns a state too large for orbax to keep it in the nodes of its tree."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jax.numpy.asarray(rng.normal(size=shape).astype(np.float32))

    return TrainState(
        step=jax.numpy.asarray(seed, np.int32),
        params={"a": draw(40, 20), "b": draw(7)},
        opt_state=(draw(40, 20), draw(7)),
        memory=Memory(draw(2, 8, 30, 4), jax.numpy.zeros(8, np.int32)),
        rng=jax.random.key(seed),
    )


STATES = {step: make_state(step) for step in (0, OLDER, NEWER)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds two checkpoints, of which the newest is the best: not to be changed."""
    workdir = tmp_path_factory.mktemp("saved")
    with save_restore.Checkpoints(workdir) as manager:
        for step in (OLDER, NEWER):
            position = Position(step, 2, 3)
            manager.save(step, STATES[step], position, 10.0 - step)
    return workdir


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Holds a copy of `saved`."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [half, flip, empty, Path.unlink]


def newest(workdir: Path) -> Path:
    return workdir / "checkpoints" / str(NEWER)


def resume(workdir: Path) -> save_restore.Snapshot:
    with save_restore.Checkpoints(workdir) as manager:
        restored = manager.restore(like(STATES[0]))
    assert restored is not None
    assert_same(restored.state, STATES[restored.step])
    assert restored.position == Position(restored.step, 2, 3)
    return restored


def load(workdir: Path, which: str) -> int:
    params = like(STATES[0].params)
    got, step = save_restore.restore_params(workdir, which, params)
    assert_same(got, STATES[step].params)
    return step


@pytest.mark.parametrize(
    "damages",
    [DAMAGES, *(pytest.param([each], marks=pytest.mark.long) for each in DAMAGES)],
    ids=lambda damages: "_".join(damage.__name__ for damage in damages),
)
def test_damage_to_any_file_is_noticed_or_harmless(
    saved: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damages: list[Callable[[Path], None]],
) -> None:
    """The damages take turns; parameter arrays always also get a changed bit."""
    paths = [path.relative_to(saved) for path in sorted(newest(saved).rglob("*"))]
    files = [path for path in paths if (saved / path).is_file()]
    assert len(files) > 20
    cases = [(path, damages[n % len(damages)]) for n, path in enumerate(files)]
    cases += [(path, flip) for path in files if {"params", "d"} <= {*path.parts}]
    noticed, named = [], set()
    for number, (path, damage) in enumerate(cases):
        workdir = tmp_path / str(number)
        shutil.copytree(saved, workdir)
        damage(workdir / path)
        try:
            if "training" not in path.parts:
                assert load(workdir, "latest") == NEWER
        except Damaged as error:
            assert f"checkpoint {NEWER} is damaged" in str(error)
            assert "\n" not in str(error)
            named.add(str(error).partition("array ")[2].partition(":")[0])
        capfd.readouterr()
        step = resume(workdir).step
        said = capfd.readouterr().err
        aside = list((workdir / "checkpoints").glob(f"{NEWER}.damaged-*"))
        if step == OLDER:
            noticed.append(str(path))
            assert f"checkpoint {NEWER} is damaged (" in said
            assert "TRYING AN OLDER ONE" in said
            assert len(aside) == 1 and f"set aside as {aside[0]}" in said
        else:
            assert not aside and "damaged" not in said
    assert any("record" in path for path in noticed)
    assert any("ocdbt.process_0" in path for path in noticed), "the numbers"
    assert "params/a" in named


@pytest.mark.parametrize("item", ["record", "params", "training", "."])
def test_a_missing_or_empty_folder_is_noticed(copied: Path, item: str) -> None:
    shutil.rmtree(newest(copied) / item)
    (newest(copied) / item).mkdir(parents=True)
    (copied / "checkpoints" / "99").mkdir()  # left by a failed copy
    with contextlib.nullcontext() if item == "training" else pytest.raises(Damaged):
        load(copied, str(NEWER))
    assert resume(copied).step == OLDER
    names = {path.name for path in (copied / "checkpoints").iterdir()}
    assert names == {str(OLDER), f"{NEWER}.damaged-1", "99.damaged-1"}


def test_the_step_of_a_damaged_checkpoint_is_saved_again(copied: Path) -> None:
    assert load(copied, "best") == NEWER
    (newest(copied) / "record" / "metadata").unlink()
    assert load(copied, "best") == OLDER, "the best of the intact ones"
    for again in (1, 2):
        with save_restore.Checkpoints(copied) as manager:
            restored = manager.restore(like(STATES[0]))
            assert restored is not None and restored.step == OLDER
            manager.save(NEWER, STATES[NEWER], Position(NEWER, 2, 3), None)
        aside = sorted((copied / "checkpoints").glob(f"{NEWER}.damaged-*"))
        assert len(aside) == again
        assert resume(copied).step == NEWER
        flip(newest(copied) / "record" / "metadata")


def test_another_position_in_the_text_is_noticed(copied: Path) -> None:
    path = newest(copied) / "record" / "metadata"
    text = path.read_text("utf-8")
    path.write_text(text.replace('"token_offset": 3', '"token_offset": 7'), "utf-8")
    assert path.read_text("utf-8") != text
    assert resume(copied).step == OLDER
