"""Commands run in-process, and one tiny run that is trained once for all workers."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock

from txl_jax.main import main

TEXT = "".join(f"{n % 97} is {n} less {n - n % 97}\n" for n in range(1000))
EXPERIMENT = """
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path={path!r}, data_dir={data_dir!r})
    c.model.update(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32)
    c.model.update(mem_len=8, dropout=0.0)
    c.train.update(num_steps=60, batch_size=8, tgt_len=8, log_every=1, eval_every=30)
    c.optim.lr = 2e-2
    c.eval.update(tgt_len=8, mem_len=8, baselines=True)
    c.generate.update(prompt="1 is ", num_tokens=20, mem_len=8)
    c.checkpoint.every_steps = 30
    return c
"""
SECRET = "of-no-one-else-8dJq2"  # in the environment while the run is trained


class Done(NamedTuple):
    """The outcome of a command."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON of the last line on stdout."""
        assert self.status == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def command(*argv: str) -> Done:
    """Runs a command line in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(list(argv))
    return Done(status, out.getvalue(), err.getvalue())


class Home(NamedTuple):
    """A folder with a text, its tokens, an experiment and its trained run."""

    path: Path
    trained: Done

    @property
    def run(self) -> Path:
        """The trained run's workdir."""
        return self.path / "run"

    def read(self, mode: str, *argv: str) -> Done:
        """Runs a mode that needs only the workdir."""
        return command(f"--mode={mode}", f"--workdir={self.run}", *argv)

    def split(self, name: str) -> Path:
        """Returns the file of a split's tokens, one byte each."""
        (path,) = (self.path / "data" / "txl_jax").rglob(f"{name}.bin")
        return path


def train_home(path: Path) -> Home:
    """Trains the run in a new folder; most of its seconds are compilation."""
    path.mkdir()
    (path / "text.txt").write_text(TEXT)
    files = {"path": "text.txt", "data_dir": "data"}
    places = {name: str(path / file) for name, file in files.items()}
    (path / "tiny.py").write_text(EXPERIMENT.format(**places))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        trained = command(f"--config={path / 'tiny.py'}", f"--workdir={path / 'run'}")
    return Home(path, trained)


def trained_folder(factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Returns the folder of the original, which all workers share."""
    root = factory.getbasetemp()
    return (root if worker_id == "master" else root.parent) / "trained"


@pytest.fixture
def own_home(
    home: Home, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Home:
    """Copies the trained run for a single test."""
    original = trained_folder(tmp_path_factory, worker_id)
    shutil.copytree(original / "run", tmp_path / "home" / "run")
    return Home(tmp_path / "home", home.trained)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Home:
    """Copies the trained run for a file of tests; one worker has trained it for all.

    The copy's experiment names the text and the tokens of the original.
    """
    path = trained_folder(tmp_path_factory, worker_id)
    done = path.with_suffix(".json")
    with FileLock(path.with_suffix(".lock")):
        if not done.exists():
            done.write_text(json.dumps(train_home(path).trained))
    own = tmp_path_factory.mktemp("home") / "home"
    shutil.copytree(path, own)
    return Home(own, Done(*json.loads(done.read_text())))
