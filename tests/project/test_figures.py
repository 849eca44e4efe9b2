"""Output, files and restarts of the programs that make figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.figures import copying, learning
from tests.project.conftest import Start
from txl_jax.report.provenance import describe_result

PNG = b"\x89PNG"


def test_reach_plots_the_lengths_that_it_prints(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "reach.png"
    start("figures.reach", f"--n_layer=2 --tgt_len=3 --mem_len=4 --picture={picture}")
    result = json.loads(capsys.readouterr().out)
    assert result["formula_tokens"] == result["measured_tokens"] == [6, 12]
    assert result["exact"] and picture.read_bytes().startswith(PNG)


def test_positions_plots_the_cosines_that_it_prints(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "similarity.png"
    start("figures.positions", f"--picture={picture}")
    cosine = json.loads(capsys.readouterr().out)["cosine"]
    assert 1 > cosine["1"] > cosine["10"] > cosine["100"] > cosine["1000"] > 0
    assert picture.read_bytes().startswith(PNG)


def test_a_log_has_a_line_for_each_validation(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = {"total_seconds": {"compile": 1.0, "update": 2.0, "input": 0.5, "a": 9.0}}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, loss, valid in ((5, 4.0, {}), (10, 3.0, {"valid_nll": 3.2})):
            row = {"step": step, "exact": {"loss": loss, **valid}, "timing": seconds}
            print(json.dumps(row), file=file)
    train = {"batch_size": 3, "tgt_len": 4, "segments_per_update": 2, "varlen": False}
    config: dict[str, Any] = dict.fromkeys(("model", "optim", "eval", "mesh"), {})
    config |= {"train": train, "data": {"corpus": "text"}}
    local = {
        "data": {"data_dir": "/home/me", "path": "/home/me/text", "corpus": "text"}
    }
    local["run"] = {"wandb": "mine"}
    start_of_run = dict.fromkeys(learning.PROVENANCE, 0) | {"config": config | local}
    run = {"parameters": 0, "starts": [start_of_run]}
    (tmp_path / "run.json").write_text(json.dumps(run), "utf-8")
    log, picture = tmp_path / "log.jsonl", tmp_path / "loss.png"
    flags = f"--workdir={tmp_path} --log={log} --picture={picture} --level=a=b=2.5"
    start("figures.learning", flags)
    facts, line = map(json.loads, log.read_text("utf-8").splitlines())
    assert facts["config"] == config, "without places on this machine"
    assert line == json.loads(capsys.readouterr().out)
    assert (line["tokens"], line["train_nats"], line["seconds"]) == (240, 3.5, 3.5)
    assert picture.read_bytes().startswith(PNG)


GRID = "--delays 3 9 --mem_lens 0 16 --seeds 1 2 --updates=100"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces training; returns the folders of the cells that would train."""
    folders: list[str] = []

    def run(config: object, folder: Path) -> dict[str, float]:
        folders.append(folder.name)
        return {"answers": 7, "accuracy": 0.5, "nll_nats": 1.0}

    monkeypatch.setattr(copying, "train_and_count", run)
    return folders


def test_copying_makes_each_cell_once(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path, counted: list[str]
) -> None:
    assert start("figures.copying", f"{GRID} --workdir={tmp_path}") == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == len(counted) == 8 and result["chance"] == 1 / 8
    cell = result["cells"][1]
    assert (cell["delay"], cell["mem_len"], cell["seed"]) == (3, 16, 1)
    assert cell["distance_tokens"] == 3 + 8
    assert set(cell["provenance"]) == {*describe_result()}
    assert json.loads((tmp_path / "copying.json").read_text()) == result
    assert (tmp_path / "copying.png").read_bytes().startswith(PNG)
    # After a kill, one cell has no result yet.
    folder = tmp_path / counted[3]
    (folder / "accuracy.json").unlink()
    counted.clear()
    assert start("figures.copying", f"{GRID} --workdir={tmp_path}") == 0
    assert counted == [folder.name]
