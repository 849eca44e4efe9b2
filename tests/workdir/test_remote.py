"""A workdir on gs://: resuming elsewhere, failures, and damage."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_checkpoint import assert_same, like, make_state
from tests.support.refusal import refused
from tests.support.store import Store, remote, shared_store, store
from txl_jax.checkpoint import save_restore
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.runtime import storage
from txl_jax.workdir.folder import METRICS, find_workdir
from txl_jax.workdir.run_record import last_step
from txl_jax.workdir.staging import Staging

FIXTURES = remote, shared_store, store
NLL = {1: 3.0, 2: 1.0, 3: 2.0, 4: None}  # the best is 2


def run(workdir: str, last: int) -> tuple[int, list[int]]:
    """Simulates a run: resumes at the newest checkpoint and saves steps up to `last`.

    Returns the step at which it resumed, and the failed saves.
    """
    folder = find_workdir(workdir)
    with (
        Staging(folder, METRICS) as staging,
        save_restore.Checkpoints(folder, keep=2) as manager,
    ):
        log = staging.folder / METRICS
        resumed = manager.restore(like(make_state(0)))
        begin = resumed.step if resumed else 0
        if resumed:
            assert_same(resumed.state, make_state(begin))
            assert log.read_text().count("\n") >= begin
        for step in range(begin + 1, last + 1):
            log.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, step + 1)))
            state, position = make_state(step), Position(epoch=step)
            manager.save(step, state, position, NLL[step], staging.upload)
            manager.poll(wait=True)
        manager.finish(last)
        return begin, manager.failed


def test_another_machine_resumes_reads_and_detects_damage(
    store: Store, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(remote, 3) == (0, []) and store.saved(remote) == [2, 3]
    names = store.names(remote)
    params = make_state(0).params
    for which, step in (("best", 2), ("latest", 3)):
        restored = save_restore.restore_params(
            find_workdir(remote), which, like(params)
        )
        assert restored[1] == step
        assert_same(restored[0], make_state(step).params)

    (array, *_) = [name for name in names if "/3/params/" in name and "/d/" in name]
    content = bytearray(store.read(f"{remote}/{array}"))
    content[len(content) // 2] ^= 1
    store.write(f"{remote}/{array}", bytes(content))
    assert run(remote, 3) == (2, []), "without the damaged checkpoint"
    said = capsys.readouterr().err
    assert "checkpoint 3 is damaged" in said and "TRYING AN OLDER ONE" in said
    assert f"is set aside as {remote}/checkpoints/3.damaged-1" in said
    aside = store.names(f"{remote}/checkpoints/3.damaged-1")
    assert "commit_success.txt" in aside and len(aside) > 20, "it stays"

    store.delete(f"{remote}/checkpoints/3/record/metadata")
    assert run(remote, 4) == (2, [])
    assert "checkpoint 3 is damaged (its manifest" in capsys.readouterr().err
    assert store.read(f"{remote}/{METRICS}").count(b"\n") == 4

    # Uncommitted checkpoints do not count, and are removed by the next save.
    for step in (3, 4):
        store.delete(f"{remote}/checkpoints/{step}/commit_success.txt")
    assert run(remote, 3) == (2, [])
    assert store.saved(remote) == [2, 3] and not store.names(f"{remote}/checkpoints/4")


def test_a_run_whose_checkpoints_have_gone_is_not_started_again(
    store: Store, remote: str
) -> None:
    run(remote, 1)
    seconds = {"total_seconds": {"checkpoint": 0.0}}
    line = {"step": 1, "exact": {"valid_nll": 3.0}, "timing": seconds}
    store.write(f"{remote}/{METRICS}", json.dumps(line).encode())
    names = store.names(f"{remote}/checkpoints")
    for name in names[1:]:
        assert last_step(find_workdir(remote)) in (0, 1), "a killed save leaves a part"
        store.delete(f"{remote}/checkpoints/{name}")
    store.delete(f"{remote}/checkpoints/{names[0]}")
    with refused(f"{remote} was at update 1, and {remote}/checkpoints has no checkp"):
        last_step(find_workdir(remote))


def test_a_failed_save_is_reported_and_the_next_succeeds(
    store: Store, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(method: str, path: str) -> int | None:
        # TensorStore names the object in the query, other libraries in the body.
        return 403 if method == "POST" and "checkpoints/2/params" in path else None

    store.proxy.hook = forbid
    assert run(remote, 3) == (0, [2])
    said = capsys.readouterr().err
    assert "CHECKPOINT 2 COULD NOT BE SAVED" in said and "PERMISSION_DENIED" in said
    assert "training continues, the newest checkpoint is 1" in said
    assert store.saved(remote) == [1, 3]

    store.proxy.hook = lambda method, path: (
        403 if "uploadType" in path and "checkpoints/4" in path else None
    )
    with pytest.raises(UserError, match="the last checkpoint, of update 4, could not"):
        run(remote, 4)
    assert store.saved(remote) == [1, 3]
    # Threads of the first failed save may write late; another start removes the rest.
    names = store.names(f"{remote}/checkpoints")
    assert not [name for name in names if name.startswith("2/")], "no partial files"


@pytest.mark.long
def test_unreachable_checkpoints_are_not_damaged(store: Store, remote: str) -> None:
    run(remote, 3)
    for part in ("3/record/metadata", "3/params"):
        store.proxy.hook = lambda method, path, part=part: (  # type: ignore[misc]
            403 if part in path and "commit" not in path and method == "GET" else None
        )
        with pytest.raises(UserError, match="cannot re"):
            run(remote, 4)
    store.proxy.hook = lambda method, path: None
    assert run(remote, 4) == (3, [])


def test_bad_addresses(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("s3://b/run", "gs://", "gs://b/../run", "gs://b//run"):
        with refused("is neither a folder nor gs://BUCKET/FOLDER"):
            find_workdir(address)
    monkeypatch.setattr(storage, "LIBRARIES", ("gcsfs", "no_such_library"))
    with refused(r"needs no_such_library: pip.*txl_jax\[gcs\]"):
        find_workdir("gs://bucket/run")


def test_staged_files_are_uploaded_once(store: Store, remote: str) -> None:
    workdir: Any = find_workdir(remote)
    with Staging(workdir) as staging:
        (staging.folder / "profile").mkdir()
        (staging.folder / "profile/trace").write_text("one")
        staging.upload()
        before = len(store.proxy.calls)
        staging.upload()
        assert len(store.proxy.calls) == before, "it has not changed"
        (staging.folder / "loss.png").write_text("two")
    assert store.names(remote) == ["loss.png", "profile/trace"]
    assert not staging.folder.exists()
    with Staging(workdir, "loss.png", "absent") as staging:
        assert [path.name for path in staging.folder.iterdir()] == ["loss.png"]
    with Staging(Path("a/folder")) as staging:
        assert staging.folder == Path("a/folder")
