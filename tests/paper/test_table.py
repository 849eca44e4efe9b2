"""The mode `table`: the configs of its rows, and its runs, which can resume.

Training is replaced by made-up numbers; `tests.cli.test_remote_modes` trains a table.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_main import documented
from tests.support.trained import command
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.errors import RETRY
from txl_jax.paper import options as ablation
from txl_jax.paper import table
from txl_jax.paper.options import TABLES, TableConfig


def score(row: Config, workdir: Path, *_: object) -> dict[str, Any]:
    """Makes up numbers."""
    nll = 2.0 + 0.001 * row.train.seed - 0.1 * (row.model.mem_len > 0)
    return {"nll_nats": {str(n): nll for n in table.lengths(row)}, "tokens": 9}


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
    other = TableConfig(rows=("wt103_128m",), seeds=1)
    table.ablate(other, tmp_path / "other", {"train.num_steps": 40})
    table.ablate(other, tmp_path / "other", {"train.num_steps": 80})
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
    timing = {"total_seconds": {"update": 2690.0, "evaluation": 10.0}}
    line = {"step": 1, "exact": {}, "timing": timing}
    for name, days in {"a": [24], "b": [24, 26]}.items():
        times = [f"2026-11-{day}T02:04:08+00:00" for day in days]
        starts = [{"time": time, "device_kind": "cpu", **code} for time in times]
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"starts": starts}))
        (tmp_path / name / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    origin = table.describe_runs([tmp_path / name for name in ("a", "b", "lost")])
    assert origin["hours"] == 1.5
    assert table.describe_origin(origin) == (
        "Training all runs, with validation, took 1.5 hours on 2 x cpu (2026-11-24, "
        "2026-11-26; revision `1234567`)."
    )


ROWS = [(number, name) for number, rows in TABLES.items() for name in rows]


def shrunk(name: str) -> Config:
    return table.row_config(name, {})


def differences(one: Config, other: Config) -> set[str]:
    sections = ("model.", "train.", "optim.", "data.")
    return {x for x in configs.differences(one, other) if x.startswith(sections)}


POSITIONS = {
    ablation.OURS: "transformer_xl",
    ablation.SHAW: "shaw",
    ablation.VASWANI: "sinusoidal",
    ablation.AL_RFOU: "learned",
}


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_a_row_describes_its_config(number: str, name: str) -> None:
    row, config = TABLES[number][name], configs.load(name)
    assert config.model.position == POSITIONS[row.encoding]
    assert row.recurrence == ("yes" if config.model.mem_len > 0 else "no")
    assert config.train.half_loss == (row.loss == "half")
    first, second = (table.row_config(name, {}, seed) for seed in (0, 1))
    assert differences(second, first) == {"train.seed"}
    if row.parent:  # miniatures differ in the same fields as the published configs
        published = differences(config, configs.load(row.parent))
        small = differences(shrunk(name), shrunk(row.parent))
        # More layers are unrolled; the sizes of a larger model are not kept.
        assert small - published <= {"model.unroll"}
        larger = {"model.dropout", "train.batch_size", "train.num_steps"}
        assert published - small <= larger and row.parent in TABLES[number]


def test_a_miniature_has_an_eighth_of_the_lengths_and_takes_overrides() -> None:
    flags = {"train.num_steps": 80, "train.batch_size": 4}
    row = table.row_config("wt103_shaw", flags, 2)
    lengths = (row.model.mem_len, row.train.tgt_len, row.model.n_position)
    assert lengths == (16, 16, 32)
    assert (row.train.num_steps, row.train.batch_size) == (80, 4)
    assert (row.train.seed, row.eval.max_tokens) == (1113, table.SCORED)
    assert (row.optim.warmup_steps, row.checkpoint.every_steps) == (8, 20)
    # The largest distance in training; a table's last row covers all greater ones.
    assert (shrunk("wt103_128m").eval.clamp_len, row.eval.clamp_len) == (31, 0)


def test_every_token_attends_to_the_given_length() -> None:
    memory, window = shrunk("wt103_128m"), shrunk("wt103_no_recurrence")
    assert (table.init_len(memory), table.init_len(window)) == (32, 16)
    assert table.lengths(memory) == [16, 24, 32, 48, 64, 80]
    for length in table.lengths(memory):
        config = table.attend(memory, length)
        assert (config.mem_len, config.same_length, config.ext_len) == (length, True, 0)
    assert table.lengths(window) == [8, 12, 16, 24, 32, 40]
    for length in table.lengths(window):
        config = table.attend(window, length)
        assert (config.mem_len, config.tgt_len + config.ext_len) == (0, length)
    assert table.lengths(shrunk("wt103_al_rfou")) == [8, 12, 16]
    one = {"train.tgt_len": 1}
    shortest = table.row_config("wt103_no_recurrence", one)
    assert min(table.lengths(shortest)) == 1  # the token that is scored
