"""A workdir in a bucket: what a kill leaves, what fails, and what is damaged there."""

import contextlib
import itertools
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_checkpoint import assert_same, like, make_state
from tests.support.buckets import Bucket, bucket
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import Checkpoints, open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.main import main
from txl_jax.workdir import bucket as buckets
from txl_jax.workdir import lease, uploader
from txl_jax.workdir.folder import find
from txl_jax.workdir.lock import locked
from txl_jax.workdir.uploader import Uploader

assert bucket  # the fixture

URL = "gs://lake/runs/one"
NLL = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5}  # the best is 2


class Killed(BaseException):
    """The process is gone: nothing catches it."""


@pytest.fixture(autouse=True)
def elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: type[Bucket]
) -> type[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.05)
    return bucket


def save(manager: Checkpoints, step: int, nll: float | None) -> None:
    state = make_state(step)
    with manager.attempt(step):
        save_restore.save(manager, step, state, Position(epoch=step), nll)


def opened(folder: Path, keep: int = 2, read_only: bool = False) -> Checkpoints:
    config, uploads = CheckpointConfig(keep=keep), uploader.of(folder)
    return open_checkpoints(folder, config, uploads, read_only=read_only)


def run(last: int = 5, folder: Path | None = None) -> tuple[int, Path, list[int]]:
    """Saves the steps up to `last`, from the newest there is: a run without a model.

    Returns the step it resumed at, its folder and the copies that failed.
    """
    folder = folder or find(URL)
    with locked(folder), closing(opened(folder)) as manager:
        resumed = save_restore.restore(manager, like(make_state(0)))
        begin = resumed.step if resumed else 0
        if resumed:
            assert_same(resumed.state, make_state(resumed.step))
        for step in range(begin + 1, last + 1):
            lines = "".join(f'{{"step": {n}}}\n' for n in range(1, step + 1))
            (folder / "metrics.jsonl").write_text(lines)
            save(manager, step, NLL[step])
            manager.poll(wait=True)
        manager.finish(last)
        assert manager.uploader
        return begin, folder, manager.uploader.failed


def forget(folder: Path) -> None:
    """Takes the machine away."""
    shutil.rmtree(folder)
    buckets._opened.clear()


def kept(bucket: type[Bucket]) -> dict[int, Any]:
    """Returns the bucket's index."""
    file = bucket.store.get(f"/{URL[5:]}/{buckets.INDEX}")
    text = file.getvalue() if file else f'{{"{buckets.CHECKPOINTS}": {{}}}}'
    return {int(k): v for k, v in json.loads(text)[buckets.CHECKPOINTS].items()}


def names(bucket: type[Bucket]) -> set[str]:
    return {name.removeprefix(f"/{URL[5:]}/") for name in bucket.store}


def test_another_machine_goes_on_and_evaluates(bucket: type[Bucket]) -> None:
    _, folder, failed = run(4)
    assert not failed and sorted(kept(bucket)) == [2, 3, 4]
    stored = {
        f"checkpoints/{entry['folder']}/{name}"
        for entry in kept(bucket).values()
        for name in entry["files"]
    }
    assert names(bucket) == stored | {"metrics.jsonl", buckets.INDEX}, "and no lock"
    forget(folder)
    # Whoever reads fetches the files of what it reads alone.
    assert find(URL) == folder
    params = make_state(0).params
    with closing(opened(folder, read_only=True)) as manager:
        for which, step in (("best", 2), ("latest", 4)):
            got, found = save_restore.restore_params(manager, which, like(params))
            assert found == step
            assert_same(got, make_state(step).params)
    assert not list(folder.glob("checkpoints/3/params/*"))
    assert not list(folder.glob("checkpoints/4/training/*"))
    (folder / "attention.html").write_text("a picture")
    metrics = bucket.store[f"/{URL[5:]}/metrics.jsonl"]
    remote = buckets.of(folder)
    assert remote
    remote.store_files()
    assert bucket.store[f"/{URL[5:]}/metrics.jsonl"] is metrics, "it has not changed"
    assert "attention.html" in names(bucket)
    forget(folder)
    assert run()[0] == 4 and sorted(kept(bucket)) == [2, 4, 5]
    assert not list(folder.glob("checkpoints/2/params/*")), "nothing needs it"


def attempts(bucket: type[Bucket], deadly: int, stays: bool = False) -> int:
    """Runs until it is done, killed once at a call; returns the step resumed at."""
    calls = itertools.count()

    def before(call: str, path: str) -> None:
        if next(calls) >= deadly:
            raise Killed(path)

    bucket.before = staticmethod(before)
    folder = find(URL)
    with contextlib.suppress(Killed):
        run(folder=folder)
    newest = max(kept(bucket), default=0)
    bucket.before = staticmethod(lambda *_: None)
    if not stays:
        forget(folder)
    resumed, folder, failed = run()
    assert not failed and (resumed >= newest if stays else resumed == newest)
    lines = bucket.store[f"/{URL[5:]}/metrics.jsonl"].getvalue()
    assert lines.count(b"\n") == 5
    assert sorted(kept(bucket)) == [2, 4, 5]
    folders = {name.split("/")[1] for name in names(bucket) if "/" in name}
    assert folders == {entry["folder"] for entry in kept(bucket).values()}
    forget(folder)
    return resumed


@pytest.mark.parametrize(
    ("deadly", "stays"), [(1, False), (25, False), (60, False), (60, True)]
)
def test_killed_while_copying_it_goes_on(
    bucket: type[Bucket], deadly: int, stays: bool
) -> None:
    """Elsewhere from what the bucket has; where it was from what the disk has too."""
    attempts(bucket, deadly, stays)


@pytest.mark.long
def test_killed_at_every_call(bucket: type[Bucket]) -> None:
    resumed, calls = [], list[str]()
    bucket.before = staticmethod(lambda call, path: calls.append(path))
    forget(run()[1])
    for deadly in range(len(calls)):
        bucket.store.clear()
        resumed.append(attempts(bucket, deadly))
    # Not in order: the lock's calls, among the others, go by the clock.
    assert set(resumed) == {0, 1, 2, 3, 4, 5}


def test_a_step_saved_again_replaces_itself_at_once(bucket: type[Bucket]) -> None:
    folder = find(URL)

    def puts(call: str, path: str) -> None:
        if call == "put" and "/1.again/" in path:
            assert kept(bucket)[1]["folder"] == "1"
            assert "checkpoints/1/record/metadata" in names(bucket)

    with locked(folder), closing(opened(folder, keep=1)) as manager:
        save(manager, 1, None)
        manager.poll(wait=True)
        bucket.before = staticmethod(puts)
        save(manager, 1, 2.0)
        manager.finish(1)
    assert kept(bucket)[1]["folder"] == "1.again"
    assert not [name for name in names(bucket) if name.startswith("checkpoints/1/")]
    forget(folder)
    with closing(opened(find(URL), read_only=True)) as manager:
        assert manager.validated(1)


def test_a_copy_that_fails_is_told_and_made_up_for(
    bucket: type[Bucket], capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(call: str, path: str) -> None:
        if "/checkpoints/2/" in path and not bucket.store.get("tried"):
            bucket.store["tried"] = True
            raise RuntimeError("403 Forbidden\nand a trace")

    bucket.before = staticmethod(forbid)
    _, folder, failed = run(3)
    said = capsys.readouterr().err
    assert failed == [2]
    assert f"CHECKPOINT 2 COULD NOT BE COPIED TO {URL} (RuntimeError: 403" in said
    assert "the newest there is 1;" in said and "and a trace" not in said
    assert sorted(kept(bucket)) == [2, 3]

    def forbid_all(call: str, path: str) -> None:
        if call == "put":
            raise RuntimeError("403 Forbidden")

    bucket.before = staticmethod(forbid_all)
    with pytest.raises(UserError, match="the last checkpoint, of update 4, could not"):
        run(4)
    assert sorted(kept(bucket)) == [2, 3]
    # The same machine goes on from what it has, and copies that.
    bucket.before = staticmethod(lambda *_: None)
    assert run(4)[0] == 4 and sorted(kept(bucket)) == [2, 3, 4]
    assert max(kept(bucket)) == 4


def test_damage_in_the_bucket_is_noticed(
    bucket: type[Bucket], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = run(4)
    forget(folder)
    entry = kept(bucket)[4]
    inside = next(name for name in entry["files"] if name.startswith("params/d/"))
    file = bucket.store[f"/{URL[5:]}/checkpoints/4/{inside}"]
    data = file.getvalue()
    file.seek(0)
    file.write(bytes([data[0] ^ 1]))
    assert run()[0] == 3
    assert f"{URL}/checkpoints/4/{inside} is [" in capsys.readouterr().err
    forget(folder)
    del bucket.store[f"/{URL[5:]}/checkpoints/5/record/metadata"]
    assert run()[0] == 4
    assert "checkpoint 5 is damaged" in capsys.readouterr().err
    index = bucket.store[f"/{URL[5:]}/{buckets.INDEX}"]
    index.seek(20)
    index.write(b"#")
    with pytest.raises(UserError, match=r"checkpoints\.json is damaged"):
        find(URL)


def test_one_run_at_a_time(
    bucket: type[Bucket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    folder = find(URL)
    with locked(folder):
        assert find(URL) == folder, "the same machine may read"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        other = find(URL)
        with pytest.raises(UserError, match=r"gs://lake.* in use by another run \(pro"):
            with locked(other):
                pass
    with locked(other):
        pass
    # One that is killed is taken over, and one that only slept ends.
    monkeypatch.setattr(lease, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.05)
    with locked(other):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with locked(find(URL)):
            assert "taken over" in capsys.readouterr().err
            there = buckets.of(other)
            assert there
            copies = Uploader(there)
            copies.begin([1])
            with pytest.raises(UserError, match="was taken over by another run"):
                copies.poll(wait=True)


def test_another_run_between_fetching_and_locking(
    bucket: type[Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find(URL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    run(2)
    with pytest.raises(UserError, match="has just changed"):
        run(folder=folder)
    bucket.store.clear()
    with pytest.raises(UserError, match="is empty, but /.* holds a run"):
        find(URL)


@pytest.mark.parametrize(
    ("given", "line"),
    {
        "s3://b/run": "neither a folder nor gs://BUCKET/FOLDER",
        "gs://": "neither a folder nor gs://",
        "gs://b/../run": "neither a folder nor gs://",
        "gs://b//run": "neither a folder nor gs://",
    }.items(),
)
def test_what_is_no_address_is_refused(given: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        find(given)


def test_refusals(bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="lake/mine holds files, but no checkpoints"):
        bucket().pipe_file("gs://lake/mine/config.json", b"{}")
        find("gs://lake/mine")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(UserError, match="is for one process"):
        find(URL)
    monkeypatch.delenv("JAX_NUM_PROCESSES")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Anonymous caller\nand a trace")

    monkeypatch.setattr(Bucket, "cat_file", refuse)
    with pytest.raises(UserError, match=r"cannot read gs://lake/runs/one \(Runtime"):
        find(URL)


TEXT = "".join(f"{n % 97} is {n} less {n - n % 97}\n" for n in range(1000))
EXPERIMENT = """
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path={path!r}, data_dir={data_dir!r})
    c.model.update(n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=32, mem_len=8)
    c.train.update(num_steps=24, batch_size=8, tgt_len=8, log_every=1, eval_every=12)
    c.eval.update(tgt_len=8, mem_len=8)
    c.generate.update(prompt="1 is ", num_tokens=5, mem_len=8)
    c.checkpoint.every_steps = 6
    return c
"""


def command(
    capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[dict[str, Any], str]:
    """Returns what a command printed: the JSON, and what it said."""
    status = main(list(argv))
    said = capsys.readouterr()
    assert status == 0, said.err
    return json.loads(said.out.splitlines()[-1]), said.err


def exact(text: str) -> list[Any]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["exact"]) for line in lines]


@pytest.mark.long
def test_a_killed_run_ends_as_one_on_a_disk_never_killed(
    bucket: type[Bucket], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    places = {"path": str(tmp_path / "text.txt"), "data_dir": str(tmp_path / "data")}
    (tmp_path / "tiny.py").write_text(EXPERIMENT.format(**places))
    config, there = f"--config={tmp_path / 'tiny.py'}", f"--workdir={URL}"
    straight, _ = command(capsys, config, f"--workdir={tmp_path / 'straight'}")

    def before(call: str, path: str) -> None:
        if "/checkpoints/18/" in path:
            bucket.before = staticmethod(dead)
            dead(call, path)

    def dead(call: str, path: str) -> None:
        raise Killed(path)

    bucket.before = staticmethod(before)
    with pytest.raises(Killed):
        main([config, there])
    bucket.before = staticmethod(lambda *_: None)
    assert sorted(kept(bucket)) == [6, 12]
    forget(find(URL))
    killed, said = command(capsys, there)
    assert "resumed at update 12" in said and "taken over" in said
    assert killed["nll"] == straight["nll"] and killed["failed_copies"] == []
    assert {"config.json", "vocab.json", "run.json", "result.json"} <= names(bucket)
    assert {"loss.png", "sample.txt"} <= names(bucket)
    lines = bucket.store[f"/{URL[5:]}/metrics.jsonl"].getvalue().decode()
    expected = (tmp_path / "straight" / "metrics.jsonl").read_text()
    assert exact(lines) == exact(expected) and len(exact(lines)) == 24
    # On other machines, from the bucket alone.
    forget(find(URL))
    assert command(capsys, "--mode=evaluate", there)[0]["nll"] == straight["nll"]
    forget(find(URL))
    command(capsys, "--mode=generate", there)
    forget(find(URL))
    command(capsys, "--mode=attention", there)
    assert [name for name in names(bucket) if name.endswith(".html")]
    forget(find(URL))
    more = f"--config.train.init_from={URL}", "--config.train.num_steps=12"
    begun, _ = command(capsys, config, f"--workdir={tmp_path / 'more'}", *more)
    assert begun["nll"] < straight["nll"] + 0.5
    for mode in ("import", "table"):
        assert main([f"--mode={mode}", there]) == 2
        assert "makes workdirs in a folder" in capsys.readouterr().err
