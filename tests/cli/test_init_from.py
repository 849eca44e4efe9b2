"""A run that starts from another takes its model and vocabulary."""

import shutil
from pathlib import Path

import pytest

from tests.support.store import Store, remote, shared_store, store
from tests.support.trained import Done, Home, command, home
from txl_jax.cli import flags
from txl_jax.report.metrics_log import read_metrics
from txl_jax.runtime import storage

FIXTURES = home, remote, shared_store, store


@pytest.fixture
def deep(home: Home, tmp_path: Path) -> Path:
    """Returns an experiment with another model and another vocabulary."""
    text = (home.path / "tiny.py").read_text().replace("n_layer=2", "n_layer=3")
    path = tmp_path / "deep.py"
    path.write_text(
        text.replace("    return c", "    c.data.vocab = 'char'\n    return c")
    )
    return path


def test_init_from_sets_fields_that_no_flag_sets(home: Home, deep: Path) -> None:
    workdir = deep.parent / "run"
    argv = [f"--config={deep}", f"--workdir={workdir}", "--print_config"]
    argv += [f"--config.train.init_from={home.run}", "--config.model.dropout=0.5"]
    for more, vocab in (
        ((), ("corpus", str(workdir / "vocab.json"))),
        (("--config.data.vocab=char",), ("char", "")),
    ):
        parsed = flags.parse([*argv, *more])
        model, data = parsed.config.model, parsed.config.data
        assert (model.n_layer, model.d_model, model.dropout) == (2, 16, 0.5)
        assert (data.vocab, data.vocab_path) == vocab
        assert parsed.origins["model.n_layer"] == str(home.run / "config.json")
        assert parsed.origins["train.batch_size"] == str(deep)
        assert parsed.origins["model.dropout"] == "a flag"


@pytest.mark.long
@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_run_starts_from_another_and_resumes_without_it(
    home: Home, deep: Path, store: Store, remote: str, place: str
) -> None:
    workdir, source = deep.parent / "run", str(deep.parent / "source")
    if place == "local":
        shutil.copytree(home.run, source)
    else:
        source = remote
        for path in home.run.rglob("*"):
            if path.is_file():
                name = path.relative_to(home.run).as_posix()
                store.write(f"{remote}/{name}", path.read_bytes())

    def train(steps: int) -> Done:
        fields = {"train.init_from": source, "train.num_steps": steps}
        fields |= {"train.eval_every": 2, "model.dropout": 0.1}
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        return command(f"--config={deep}", f"--workdir={workdir}", *given)

    done = train(2)
    assert done.status == 0, done.err
    assert (
        f"starts from update 60 of {source}, with its model and vocabulary, but "
        "model.dropout is 0.0 there, 0.1 here\n"
    ) in done.err
    first = read_metrics(workdir / "metrics.jsonl")[0]
    assert first["exact"]["loss"] < 2.5, "ln 256 = 5.5 from random parameters"
    saved, own = home.run / "vocab.json", workdir / "vocab.json"
    assert own.read_bytes() == saved.read_bytes()
    (storage.remote_path(remote, "") if place == "remote" else Path(source)).rename(
        f"{source}-gone"
    )
    done = train(4)
    assert done.status == 0 and "resumed at update 2" in done.err
    assert "train.num_steps was 2, is now 4, where the cosine" in done.err
    assert "starts from" not in done.err
    assert command("--mode=evaluate", f"--workdir={workdir}").status == 0


def test_paths_below_the_home_folder_work_when_a_run_is_resumed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home.path, tmp_path / "me", ignore=shutil.ignore_patterns("data"))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)

    def train(steps: int) -> Done:
        fields = {"train.init_from": "~/run", "data.vocab_path": "~/run/vocab.json"}
        fields |= {"data.path": "~/text.txt", "data.data_dir": "~/data"}
        fields |= {"train.num_steps": str(steps), "train.eval_every": "2"}
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        return command("--config=~/tiny.py", "--workdir=~/new", *given)

    assert (done := train(2)).status == 0, done.err
    assert train(4).status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["me"], "no folder ~"
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    workdir = tmp_path / "me" / "new"
    done = command("--mode=evaluate", f"--workdir={workdir}")
    assert done.status == 0 and done.result["step"] == 4, done.err
