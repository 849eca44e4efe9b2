"""A checkpoint that cannot be written is reported, and the run continues.

The disk is full by a limit on the size of a file, which the kernel holds against every
thread, and, where the user may mount one, because it is small and full; it is lost by a
file that stands where its folder was; and the right to write it is taken away.
"""

import contextlib
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import logging as absl_logging

from tests.checkpoint.test_checkpoint import assert_same, like
from tests.faults.test_corruption import STATES, make_state
from tests.support.rights import public_folder, without_rights
from tests.test_train import TEXT, tiny
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import Checkpoints, open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.cli.run import train_on
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.report.log import MetricsLog, read_metrics

pytestmark = pytest.mark.promise("Damage is noticed")

LIMIT_BYTES = 3000


@pytest.fixture(autouse=True)
def quiet_orbax() -> Iterator[None]:
    """Keeps orbax's tracebacks out of stderr, which is a file with a limit as well."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.FATAL)
    yield
    absl_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def full_disk(limit_bytes: int = LIMIT_BYTES) -> Iterator[None]:
    """Lets no file grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def lost_disk(folder: Path) -> Iterator[None]:
    """Puts a file where the folder was."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


def save(manager: Checkpoints, step: int) -> None:
    with manager.attempt(step):
        position = Position(step, 2, 3)
        save_restore.save(manager, step, make_state(step), position, None)


def settle(manager: Checkpoints) -> None:
    """Polls as the loop does, until the save is over."""
    until = time.monotonic() + 60
    while manager.saving is not None and time.monotonic() < until:
        manager.poll()
    assert manager.saving is None


def on_disk(manager: Checkpoints) -> list[str]:
    return sorted(path.name for path in Path(manager.directory).iterdir())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts one, or skips the test."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def filled_disk(folder: Path) -> Iterator[None]:
    """Leaves no byte of it."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1000)):
            pass
    try:
        yield
    finally:
        filler.unlink()


# What goes wrong with the checkpoints' folder, and what the line says of it.
TROUBLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "full": (lambda folder: full_disk(), "(File too large: "),
    "lost": (lost_disk, "(NotADirectoryError: "),
    "no space": (lambda folder: filled_disk(folder.parent), "No space left on device"),
    "no rights": (without_rights, "Permission denied"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failed_save_is_reported_and_keeps_older_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    with contextlib.ExitStack() as stack:
        workdir = tmp_path / "run"
        if trouble == "no space":
            stack.enter_context(small_disk(workdir))
        if trouble == "no rights":
            workdir = stack.enter_context(public_folder())
        check_a_failed_save(workdir, trouble, capfd)


def check_a_failed_save(
    workdir: Path, trouble: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begin, reason = TROUBLES[trouble]
    with closing(open_checkpoints(workdir, CheckpointConfig(keep=1))) as manager:
        save(manager, 1)
        settle(manager)
        with begin(workdir / "checkpoints"):
            save(manager, 2)
            settle(manager)
            said = [line for line in capfd.readouterr().err.splitlines() if line]
        (line,) = [line for line in said if "COULD NOT BE SAVED" in line]
        assert line.startswith("CHECKPOINT 2 COULD NOT BE SAVED (")
        assert reason in line
        assert "the newest checkpoint is 1" in line or trouble == "lost"
        assert (manager.failed, manager.saving) == ([2], None)
        assert "1" in on_disk(manager) and "2" not in on_disk(manager)
        save(manager, 3)
        manager.finish(3)
        assert on_disk(manager) == ["3"], "retention continues"
        assert manager.latest_step() == 3
        restored = save_restore.restore(manager, like(STATES[0]))
    assert restored is not None and restored.step == 3
    assert_same(restored.state, make_state(3))


def test_the_step_that_failed_is_saved_when_the_run_comes_to_it_again(
    tmp_path: Path,
) -> None:
    with closing(open_checkpoints(tmp_path, CheckpointConfig())) as manager:
        with full_disk():
            save(manager, 2)
            settle(manager)
        assert manager.latest_step() is None
        save(manager, 2)
        manager.finish(2)
        assert on_disk(manager) == ["2"]


def test_closing_reports_a_failure_that_was_not_polled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        with closing(open_checkpoints(tmp_path, CheckpointConfig())) as manager:
            save(manager, 2)
    assert "CHECKPOINT 2 COULD NOT BE SAVED" in capfd.readouterr().err


CONFIG = tiny(num_steps=40, eval_every=10)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Holds a run that met no fault; those after it compile as it did."""
    jax.config.update("jax_disable_most_optimizations", True)
    workdir = tmp_path_factory.mktemp("straight")
    assert train(workdir) == {"updates": 40, "failed_saves": []}
    yield workdir
    jax.config.update("jax_disable_most_optimizations", False)


def train(workdir: Path) -> dict[str, Any]:
    return train_on(CONFIG, workdir, TEXT, TEXT[:2000])


def exact(workdir: Path) -> list[Any]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [(line["step"], line["exact"]) for line in lines]


class Disk:
    """Is full from the checkpoint or the metrics of one step to the next's."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.full = contextlib.ExitStack()
        self.save, self.sync = save_restore.save, MetricsLog.sync
        self.checkpoint = self.metrics = -1
        patch.setattr(save_restore, "save", self.save_faulty)

        def sync(log: Any, valid_nll: float | None, owed: bool = False) -> None:
            self.sync_faulty(log, valid_nll, owed)

        patch.setattr(MetricsLog, "sync", sync)

    def save_faulty(self, manager: Checkpoints, step: int, *rest: Any) -> None:
        """Saves; to a full disk if it is that step's turn."""
        if step == self.checkpoint:
            manager.wait()
            self.full.enter_context(full_disk(20_000))
        self.save(manager, step, *rest)

    def sync_faulty(self, log: Any, valid_nll: float | None, owed: bool) -> None:
        """Syncs; to a full disk if it is that step's turn, else to a good one."""
        self.full.close()
        if log.step == self.metrics:
            self.full.enter_context(full_disk(log.file.tell() + 50))
        self.sync(log, valid_nll, owed)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.full.close()


def test_a_run_continues_over_a_full_disk(
    straight: Path, tmp_path: Path, disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    """Metrics that the disk refuses wait, and no checkpoint overtakes them."""
    disk.checkpoint, disk.metrics = 20, 30
    assert train(tmp_path) == {"updates": 40, "failed_saves": [20, 30]}
    said = capfd.readouterr().err
    told = said.index("CHECKPOINT 20 COULD NOT BE SAVED")
    assert told < said.index("update 30: valid bpc"), "at once"
    assert "CHECKPOINT 30 COULD NOT BE SAVED (OSError: [Errno 27]" in said
    assert exact(tmp_path) == exact(straight)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"10", "40"}


def test_a_run_whose_last_checkpoint_fails_can_be_resumed(
    straight: Path, tmp_path: Path, disk: Disk
) -> None:
    disk.checkpoint = 40
    with pytest.raises(UserError) as caught:
        train(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert "the last checkpoint, of update 40, could not be saved in" in message
    assert "it continues from update 30" in message
    disk.checkpoint = -1
    disk.full.close()
    assert train(tmp_path) == {"updates": 40, "failed_saves": []}
    assert exact(tmp_path) == exact(straight)
