"""Modes whose workdir is on gs://, besides training."""

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_huggingface import folder_of
from tests.convert.test_pytorch import case
from tests.support.processes import Processes
from tests.support.store import Proxy, Store, let_pass, remote, shared_store, store
from tests.support.tiny import FLOAT32, assert_equal
from tests.support.trained import TEXT, Home, command, home
from txl_jax.workdir import load

pytestmark = pytest.mark.long
FIXTURES = home, remote, shared_store, store


def test_a_killed_import_is_resumed(store: Store, remote: str, tmp_path: Path) -> None:
    params = case("div_val_2")[1]
    folder_of(tmp_path / "model")
    convert = ["--format=huggingface", f"--source={tmp_path / 'model'}"]
    argv = ["--mode=import", *convert, f"--workdir={remote}"]
    with contextlib.closing(Proxy(store.port)) as proxy:

        def hook(method: str, path: str) -> int | None:
            """Kills the import once an object exists whose name begins with `last`."""
            if any(name.startswith(last) for name in store.names(remote)):
                process.all[0].kill()
                return 0
            return None

        for last in ("incomplete", "checkpoints/1/record", "vocab.json", "none"):
            proxy.hook = let_pass
            process = Processes(
                tmp_path, *argv, count=1, environments=[proxy.environment()]
            )
            proxy.hook = hook
            killed = -signal.SIGKILL if last != "none" else 0
            assert process.wait() == [killed], process.said(0)
    names = {name.partition("/")[0] for name in store.names(remote)}
    assert names == {"checkpoints", "config.json", "run.json", "vocab.json"}
    assert_equal(load.load(remote).params, params)
    done = command(*argv)
    assert done.status == 2 and "is not an empty folder" in done.err

    target = tmp_path / "exported"
    out = ["--mode=export", "--format=txl_jax", f"--workdir={remote}"]
    assert command(*out, f"--target={target}").status == 0
    assert_equal(load.load(target).params, params)
    done = command(*out, "--target=gs://bucket/exported")
    assert done.status == 2 and "a new file on this machine" in done.err


@pytest.fixture
def uploaded(home: Home, store: Store, remote: str) -> str:
    """Uploads a copy of the trained run, and returns its address."""
    for path in home.run.rglob("*"):
        if path.is_file():
            name = path.relative_to(home.run).as_posix()
            store.write(f"{remote}/{name}", path.read_bytes())
    return remote


def test_results_match_a_local_run(home: Home, uploaded: str, tmp_path: Path) -> None:
    """One process reads the run from a disk, and two from gs://."""

    def read(mode: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the results of two processes on gs:// and of one on a disk."""
        run = Processes(tmp_path, f"--mode={mode}", f"--workdir={uploaded}", *flags)
        assert run.wait() == [0, 0], run.said(0) + run.said(1)
        # Gloo, which connects CPUs, writes to stdout too.
        lines = [[x for x in out.splitlines() if "{" in x] for out in run.stdout]
        assert not lines[1], "the first process prints"
        return json.loads(lines[0][-1]), home.read(mode, *flags).result

    actual, expected = read("evaluate")
    assert actual["nll"] == pytest.approx(expected["nll"], rel=FLOAT32)
    assert actual["tokens"] == expected["tokens"] > 0
    actual, expected = read("generate", "--temperature=0")
    assert actual["text"] == expected["text"] != ""

    (tmp_path / "own.txt").write_text(TEXT[:200])
    score = ["--mode=score", f"--path={tmp_path / 'own.txt'}"]
    actual = command(*score, f"--workdir={uploaded}").result
    expected = command(*score, f"--workdir={home.run}").result
    for name in ("scored_tokens", "total_nll_nats"):
        assert actual[name] == expected[name] > 0


def test_attention_and_recl(store: Store, uploaded: str) -> None:
    result = command(
        "--mode=attention", f"--workdir={uploaded}", "--max_tokens=8"
    ).result
    written = [*result["files"].values()]
    argv = [f"--workdir={uploaded}/recl", f"--workdirs={uploaded},{uploaded}/"]
    sizes = ["--contexts=4,8,4"]
    result = command("--mode=recl", *argv, *sizes).result
    calls = len(store.proxy.calls)
    again = command("--mode=recl", *argv, *sizes).result
    assert [row["ppl"] for row in again["members"]] == [
        row["ppl"] for row in result["members"]
    ]
    assert not [
        call for call in store.proxy.calls[calls:] if ".npz" in call and "POST" in call
    ]
    names = store.names(uploaded)
    for address in [*written, result["file"], result["picture"]]:
        assert address.removeprefix(f"{uploaded}/") in names


def test_table(store: Store, remote: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    argv = [
        *("--mode=table", f"--workdir={remote}", "--rows=wt103_128m", "--seeds=1"),
        *("--config.train.num_steps=8", "--config.model.d_model=16"),
        *("--config.data.corpus=text", f"--config.data.path={tmp_path / 'text.txt'}"),
        f"--config.data.data_dir={tmp_path / 'data'}",
    ]
    result = command(*argv).result
    names = store.names(remote)
    assert {"table6.md", "table6.json", "table6.png"} <= {*names}
    assert "wt103_128m/seed_1111/lengths.json" in names
    again = command(*argv)
    assert "fresh run" not in again.err
    repeated = again.result
    assert repeated.pop("provenance") and result.pop("provenance")
    assert repeated == result
