"""Versions agree everywhere, and the wheel runs without a checkout."""

import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import txl_jax

ROOT = Path(__file__).parents[2]
SMALL = (
    "--config.train.num_steps=24 --config.train.eval_every=12 "
    "--config.checkpoint.every_steps=12 --config.optim.warmup_steps=4 "
    "--config.model.n_layer=1 --config.model.d_model=16 --config.model.d_head=8 "
    "--config.model.d_inner=16 --config.generate.num_tokens=20 "
    "--config.eval.baselines=false"
)


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == txl_jax.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest[1] == txl_jax.__version__


def test_the_workflow_has_the_supported_pythons_and_platforms() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    setup = (ROOT / "setup.py").read_text("utf-8")
    assert matrix["python"] == re.findall(r'"Programming .* :: (3\.\d+)"', setup)
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]
    assert "Operating System :: MacOS" in setup


def test_the_wheel_has_the_experiments_and_their_programs() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    folders = {path.parent for path in (ROOT / "experiments").glob("*/__init__.py")}
    names = {"ablations", "figures", "recipes", "rl"}
    assert {path.name for path in folders} == names
    assert set(re.findall(r'"txl_jax\.experiments\.(\w+)"', setup)) == names
    for path in (path for folder in folders for path in folder.glob("*.py")):
        outside = re.findall(r"^ *(?:from|import) experiments", path.read_text(), re.M)
        assert not outside, f"{path}: import from ..figures"


def test_files_outside_the_wheel_are_named_as_the_repositorys() -> None:
    packaged = ROOT.glob("txl_jax/**/*.py"), ROOT.glob("experiments/**/*.py")
    for path in itertools.chain(*packaged):
        if "benchmarks" not in path.parts:
            text = " ".join(path.read_text("utf-8").replace("#", "").split())
            outside = r"(?<!repository's )(?<![\w/])(?:docs|launch|tests)/"
            assert not re.search(rf"{outside}|-m experiments\.", text), path


def run(*command: str | Path, where: Path) -> str:
    outside = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env=outside | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_a_wheel_runs_the_quickstart_from_an_empty_folder(tmp_path: Path) -> None:
    """The source archive contains the files of a checkout."""
    checkout, empty = tmp_path / "checkout", tmp_path / "empty"
    empty.mkdir()
    run("git", "clone", "--quiet", ROOT, checkout, where=tmp_path)
    run(sys.executable, "-m", "venv", tmp_path / "user", where=tmp_path)
    python = tmp_path / "user" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build", where=tmp_path)
    run(python, "-m", "build", "--outdir", tmp_path, checkout, where=tmp_path)
    (sources,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-files", where=checkout).splitlines())
    left_out = {name for name in tracked - names if name.startswith(".")}
    assert tracked - names == left_out
    assert all("/" not in name for name in left_out), "such as .gitignore"
    (wheel,) = tmp_path.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel, where=tmp_path)
    metadata = "import importlib.metadata as m; print(m.metadata('txl_jax'))"
    links = re.findall(r"\]\((\S+)\)", run(python, "-c", metadata, where=empty))
    assert len(links) > 20 and all(x.startswith("https://") for x in links)
    flags = ["--config=quickstart", f"--config.data.data_dir={tmp_path / 'data'}"]
    txl = tmp_path / "user" / "bin" / "txl"
    out = run(txl, *flags, *SMALL.split(), where=empty)
    assert json.loads(out.splitlines()[-1])["updates"] == 24
    assert (empty / "runs" / "quickstart" / "loss.png").exists()
    assert run(python, "-c", "import txl_jax; print(txl_jax.__version__)", where=empty)
    run(python, "-m", "txl_jax.experiments.recipes.series", "write", where=empty)
    assert (empty / "series.npy").exists()
    for name in ("figures.reach", "recipes.compress", "recipes.music", "rl.ppo"):
        program = f"txl_jax.experiments.{name}"
        assert run(python, "-m", program, "--help", where=empty)
