"""The programs that make figures: what they print, leave and go on with."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from txl_jax.data import copying as task

FOLDER = Path(__file__).parents[1] / "experiments" / "figures"
FILES = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
Start = Callable[[str, str], object]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a program as from the command line."""

    def main(name: str, flags: str) -> object:
        monkeypatch.setattr(sys, "argv", [name, *flags.split()])
        return importlib.import_module(f"experiments.figures.{name}").main()

    return main


@pytest.mark.parametrize("name", ["reach", "copying"])
def test_help_has_the_docstring(
    name: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        start(name, "--help")
    assert exit.value.code == 0
    assert FILES[name].split('"""')[1].splitlines()[0] in capsys.readouterr().out


def test_reach_draws_what_it_prints(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "reach.png"
    start("reach", f"--n_layer=2 --tgt_len=3 --mem_len=4 --picture={picture}")
    result = json.loads(capsys.readouterr().out)
    assert result["formula_tokens"] == result["measured_tokens"] == [6, 12]
    assert result["exact"] and picture.read_bytes().startswith(b"\x89PNG")


GRID = "--delays 3 9 --mem_lens 0 16 --seeds 1 2 --updates=100"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trains nothing; returns the folders of the cells that would have been."""
    copying = importlib.import_module("experiments.figures.copying")
    folders: list[str] = []

    def run(config: object, folder: Path) -> dict[str, float]:
        folders.append(folder.name)
        return {"answers": 7, "accuracy": 0.5, "nll_nats": 1.0}

    monkeypatch.setattr(copying, "train_and_count", run)
    return folders


def test_copying_makes_each_cell_once(
    start: Start,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    counted: list[str],
) -> None:
    assert start("copying", f"{GRID} --workdir={tmp_path}") == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == len(counted) == 8 and result["chance"] == 1 / 8
    cell = result["cells"][1]
    assert (cell["delay"], cell["mem_len"], cell["seed"]) == (3, 16, 1)
    assert cell["distance_tokens"] == 3 + 8
    limits = ("seen_by_all_tokens", "seen_by_last_tokens", "reach_tokens")
    assert [cell[name] for name in limits] == [16, 16 + 15, 2 * 16 + 15]
    assert json.loads((tmp_path / "copying.json").read_text()) == result
    assert (tmp_path / "copying.png").read_bytes().startswith(b"\x89PNG")
    # As after a kill: one cell has no result yet.
    folder = tmp_path / counted[3]
    assert folder.name == "delay=9-mem_len=16-seed=1-updates=100"
    (folder / "accuracy.json").unlink()
    counted.clear()
    assert start("copying", f"{GRID} --workdir={tmp_path}") == 0
    assert counted == [folder.name]
    assert json.loads(capsys.readouterr().out) == result


def test_copying_refuses_in_one_line(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert start("copying", f"--delays 0 --workdir={tmp_path}") == 2
    out, err = capsys.readouterr()
    assert out == "" and "data.copy_delay=0 must be from 1" in err


@pytest.mark.long
def test_memory_alone_brings_what_is_two_segments_back(
    start: Start,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"train": 300_000, "valid": 3000, "test": 20_000}
    monkeypatch.setattr(task, "SIZES", sizes)
    flags = f"--delays 24 --mem_lens 0 32 --workdir={tmp_path} --data_dir={tmp_path}"
    assert start("copying", flags) == 0
    without, within = json.loads(capsys.readouterr().out)["cells"]
    assert without["accuracy"] < 0.3 and within["accuracy"] > 0.95
    assert without["nll_nats"] > within["nll_nats"]
