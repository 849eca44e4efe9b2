"""A checkpoint that cannot be written is reported, and the run continues.

A limit on the size of files, which the kernel imposes on every thread, simulates a full
disk; a file with the folder's name simulates a lost disk.
"""

import contextlib
import dataclasses
import errno
import gc
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import test_train
from tests.checkpoint.test_checkpoint import assert_same, like
from tests.faults.test_corruption import STATES, make_state
from tests.support.processes import LIMIT_SECONDS, exact
from tests.support.refusal import refused
from tests.support.rights import public_folder, without_rights
from txl_jax.checkpoint.save_restore import Checkpoints
from txl_jax.data.streams import Position
from txl_jax.report.metrics_log import MetricsLog
from txl_jax.runtime import storage
from txl_jax.runtime.explain import explain

pytestmark = pytest.mark.promise("Damage is noticed")

LIMIT_BYTES = 3000


@pytest.fixture(autouse=True)
def no_compilation_cache() -> Iterator[None]:
    """Keeps jaxlib 0.10.1 from printing more about cached programs than the limit."""
    before: bool = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it has read the field
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


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
    """Replaces the folder by a file."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        # Threads of the failed save make the folder again while they end.
        while away.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                away.rename(folder)


def save(manager: Checkpoints, step: int) -> None:
    manager.save(step, make_state(step), Position(step, 2, 3), None)


def settle(manager: Checkpoints) -> None:
    """Polls as the training loop does, until the save is over."""
    until = time.monotonic() + LIMIT_SECONDS
    while manager.saving is not None and time.monotonic() < until:
        manager.poll()
    assert manager.saving is None


def on_disk(manager: Checkpoints) -> list[str]:
    return sorted(path.name for path in Path(manager.folder).iterdir())


# Faults of the folder of checkpoints, and a part of the line that reports each.
TROUBLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "full": (lambda folder: full_disk(), "(File too large: "),
    "lost": (lost_disk, "(NotADirectoryError: "),
    "no rights": (without_rights, "Permission denied"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failed_save_is_reported_and_keeps_older_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    begin, reason = TROUBLES[trouble]
    with contextlib.ExitStack() as stack:
        workdir = tmp_path
        if trouble == "no rights":
            workdir = stack.enter_context(public_folder())
        opened = Checkpoints(workdir, keep=1)
        manager = stack.enter_context(opened)
        save(manager, 1)
        settle(manager)
        with begin(workdir / "checkpoints"):
            save(manager, 2)
            settle(manager)
            said = capfd.readouterr().err.splitlines()
        (line,) = [line for line in said if "COULD NOT BE SAVED" in line]
        assert line.startswith("CHECKPOINT 2 COULD NOT BE SAVED (")
        assert reason in line
        assert "the newest checkpoint is 1" in line or trouble == "lost"
        assert (manager.failed, manager.saving) == ([2], None)
        assert "1" in on_disk(manager) and "2" not in on_disk(manager)
        # The next step is saved, and retention continues.
        save(manager, 3)
        save(manager, 4)
        manager.finish(4)
        assert on_disk(manager) == ["4"]
        restored = manager.restore(like(STATES[0]))
    assert restored is not None and restored.step == 4
    assert_same(restored.state, make_state(4))


def test_closing_reports_a_failure_that_was_not_polled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first save compiles for the second, when the cache has no room."""
    for disk in (contextlib.nullcontext(), full_disk()):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        with disk, Checkpoints(tmp_path) as manager:
            save(manager, 2)
    assert "CHECKPOINT 2 COULD NOT BE SAVED" in capfd.readouterr().err
    assert on_disk(manager), "else the next start would miss a saved checkpoint"


def train(workdir: Path, num_steps: int) -> dict[str, Any]:
    """Trains with steps that compute next to nothing."""
    options = dataclasses.replace(
        test_train.CONFIG.train, num_steps=num_steps, eval_every=10
    )
    config = dataclasses.replace(test_train.CONFIG, train=options)
    return test_train.train(workdir, config)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A disk that is full from a step's checkpoint or metrics to the next metrics."""
    full = contextlib.ExitStack()
    disk = SimpleNamespace(checkpoint=-1, metrics=-1, repair=full.close)
    save, log_validation = Checkpoints.save, MetricsLog.log_validation

    def save_faulty(manager: Checkpoints, step: int, *rest: Any) -> None:
        if step == disk.checkpoint:
            manager.poll(wait=True)
            full.enter_context(full_disk(40_000))
        save(manager, step, *rest)
        if step == disk.checkpoint and manager.saving is not None:
            futures.wait([manager._pending])

    def log_faulty(log: Any, valid_nll_nats: float) -> None:
        if log.step != disk.checkpoint:  # its files are still being written
            full.close()
        if log.step == disk.metrics:
            full.enter_context(full_disk(log.file.tell() + 50))
        log_validation(log, valid_nll_nats)

    monkeypatch.setattr(Checkpoints, "save", save_faulty)
    monkeypatch.setattr(MetricsLog, "log_validation", log_faulty)
    with full:
        yield disk


def test_a_run_continues_over_a_full_disk_and_after_it(
    tmp_path: Path, disk: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    """Metrics that the disk refuses wait, and no checkpoint overtakes them."""
    disk.checkpoint, disk.metrics = 20, 30
    assert train(tmp_path, 40)["failed_saves"] == [20, 30]
    said = capfd.readouterr().err
    told = said.index("CHECKPOINT 20 COULD NOT BE SAVED")
    assert told < said.index("update 30: valid "), "at once"
    assert "CHECKPOINT 30 COULD NOT BE SAVED (OSError: [Errno 27]" in said
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"10", "40"}

    disk.checkpoint = 50
    with refused(
        "the last checkpoint, of update 50, could not be saved in .* "
        "it continues from update 40"
    ):
        train(tmp_path, 50)
    disk.checkpoint = disk.metrics = -1
    disk.repair()
    assert train(tmp_path, 50)["failed_saves"] == []
    train(tmp_path / "straight", 50)
    assert exact(tmp_path) == exact(tmp_path / "straight")


def test_a_file_is_synced_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (path := tmp_path / "run.json").write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.write_atomically(path, "new")
    assert [path] == [*tmp_path.iterdir()] and path.read_text() == "old"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "metrics.jsonl"
    with pytest.raises(FileNotFoundError) as caught:
        MetricsLog(path, 0, 9, 1)
    line = explain(caught.value)
    assert line and line.startswith(f"cannot use {path} (No such")


def test_links_are_followed_and_only_regular_files_are_replaced(tmp_path: Path) -> None:
    ends = os.pipe()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(f"/dev/fd/{ends[1]}")):
        with pytest.raises(FileExistsError, match=f"not a regular file: '{path}'"):
            storage.write_atomically(path, "new")
    for end in ends:
        os.close(end)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder").mkdir()
    for name in ("old", "absent"):
        link, target = tmp_path / f"to_{name}", tmp_path / "folder" / name
        link.symlink_to(target)
        for content in ("one", "two"):
            storage.write_atomically(link, content)
            assert link.is_symlink() and target.read_text() == content
    link, target = tmp_path / "to_new", tmp_path / "folder" / "new"
    link.symlink_to(target)
    for content in ("one", "two"):
        with storage.replacing_folder(link) as fresh:
            (fresh / content).touch()
        assert link.is_symlink() and os.listdir(target) == [content]


def test_a_killed_process_leaves_no_temporary_file(tmp_path: Path) -> None:
    with storage.replacing(tmp_path / "new"):
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["x" * 256, "none/x", "loop"])
def test_a_file_that_cannot_be_made_fails_before_the_work(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    storage.write_atomically(tmp_path / ("x" * 255), "new")
    before = [*tmp_path.iterdir()]
    with pytest.raises(OSError, match=f"'{tmp_path / name}'"):
        with storage.replacing(tmp_path / name):
            pytest.fail("the work began")
    assert before == [*tmp_path.iterdir()]


def test_a_full_disk_keeps_the_old_file_and_is_reported_with_its_path(
    tmp_path: Path,
) -> None:
    (path := tmp_path / "old").write_text("old")
    with full_disk(), pytest.raises(OSError, match=f"File too large: '{path}'"):
        storage.write_atomically(path, bytes(LIMIT_BYTES + 1))
    assert [path] == [*tmp_path.iterdir()] and path.read_text() == "old"
    gc.collect()  # from Python 3.13 on, an error while a file is closed would be shown
