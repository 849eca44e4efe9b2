"""The mode `table`: its runs resume, and are scored once.

Training is replaced by made-up numbers; `tests.cli.test_remote_modes` trains a table.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_main import documented
from tests.support.trained import command
from txl_jax.cli import training_run as train_mode
from txl_jax.config import Config
from txl_jax.errors import RETRY
from txl_jax.paper import table, table_rows
from txl_jax.paper.options import TableConfig


def score(row: Config, workdir: Path, tokens: None) -> dict[str, Any]:
    """Makes numbers up."""
    nll = 2.0 + 0.001 * row.train.seed - 0.1 * (row.model.mem_len > 0)
    return {"nll_nats": {str(n): nll for n in table_rows.lengths(row)}, "tokens": 9}


@pytest.mark.parametrize("trained", [4], indirect=True)
def test_an_interrupted_table_resumes(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "score", score)
    rows = ("--rows=wt103_128m,wt103_al_rfou", "--seeds=2")
    argv = [f"--workdir={tmp_path}", *rows, "--config.train.num_steps=40"]
    assert command("--mode=table", *argv).status == RETRY
    result = command("--mode=table", *argv).result
    assert documented("table", result)
    assert trained == [
        "wt103_128m seed_1111",
        "wt103_128m seed_1112",
        "wt103_al_rfou seed_1111",
        *["wt103_al_rfou seed_1112"] * 2,
    ]
    again = command("--mode=table", *argv).result
    assert again.pop("provenance") and result.pop("provenance") and again == result
    assert len(trained) == 5
    other, train = TableConfig(rows=("wt103_128m",), seeds=1), train_mode.trained
    table.run(other, tmp_path / "other", {"train.num_steps": "40"}, train)
    table.run(other, tmp_path / "other", {"train.num_steps": "80"}, train)
    assert len(trained) == 7  # another setting is another run
    saved = json.loads((tmp_path / "table6.json").read_text())
    assert saved.pop("provenance") and {"mode": "table", **saved} == result
    assert len(result["outcomes"]["wt103_128m"]["best_by_seed"]) == 2
    assert (tmp_path / "table6.png").stat().st_size > 1000
    lines = (tmp_path / "table6.md").read_text("utf-8").splitlines()
    assert "40 updates of 32 streams, 20,480 tokens of corpus `stdlib`" in lines[0]
    assert lines[4].startswith("| `wt103_128m` | yes | ours | full | 20.")
    assert lines[4].endswith("| 16 | 27.02 | 26.77 | 500 |")
    assert "`wt103_al_rfou` instead of `wt103_128m`" in lines[9]


def test_hours_and_revisions_of_all_runs_are_reported(tmp_path: Path) -> None:
    code = {"git_revision": "1234567" + "0" * 33, "device_count": 2}
    seconds = {"update": 2690.0, "evaluation": 10.0, "restart": 86_400.0}
    for name, days in {"a": [24], "b": [24, 26]}.items():
        times = [f"2026-11-{day}T02:04:08+00:00" for day in days]
        starts = [{"time": time, "device_kind": "cpu", **code} for time in times]
        run = {"starts": starts, "goodput": {"seconds": seconds}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(run))
    origin = table.describe_runs([tmp_path / name for name in ("a", "b", "lost")])
    assert origin["hours"] == 1.5
    assert table.describe_origin(origin) == (
        "Training all runs, with validation, took 1.5 hours on 2 x cpu (2026-11-24, "
        "2026-11-26; revision `1234567`)."
    )


@pytest.mark.long
def test_a_table_is_trained_and_scored(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("segment after segment; " * 2000)
    argv = [
        *("--mode=table", f"--workdir={tmp_path / 'runs'}", "--seeds=2"),
        "--rows=wt103_128m,wt103_no_recurrence,wt103_al_rfou",
        "--config.train.num_steps=40",
        *("--config.data.corpus=text", f"--config.data.path={tmp_path / 'text.txt'}"),
        *(f"--config.data.data_dir={tmp_path / 'data'}", "--config.model.d_model=16"),
    ]
    result = command(*argv).result
    for name, one in result["outcomes"].items():
        assert 1 < one["ppl_best"][0] < 20, name
    learned = result["outcomes"]["wt103_al_rfou"]
    assert list(learned["ppl_by_attention_tokens"]) == ["8", "12", "16"]
    again = command(*argv)
    assert again.result["outcomes"] == result["outcomes"]
    assert "fresh run" not in again.err and "resumed" not in again.err
