"""The table mode: the configs of its runs, and their order.

Only the long test trains; the others replace training by made-up numbers.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from txl_jax import config as configs
from txl_jax.cli import table
from txl_jax.config import Config
from txl_jax.errors import RETRY, Interrupted, UserError
from txl_jax.main import main
from txl_jax.tables import rows as ablation
from txl_jax.tables.options import TableConfig
from txl_jax.tables.rows import TABLES

ROWS = [(number, name) for number, rows in TABLES.items() for name in rows]


def shrunk(number: int, name: str) -> Config:
    return table.row_config(name, TableConfig(table=number), {})


def differences(one: Config, other: Config) -> set[str]:
    sections, others = dataclasses.asdict(one), dataclasses.asdict(other)
    return {
        f"{section}.{key}"
        for section in ("model", "train", "optim", "data")
        for key, value in sections[section].items()
        if value != others[section][key]
    }


# Rows


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_a_row_describes_its_config(number: int, name: str) -> None:
    row, config = TABLES[number][name], configs.parse(configs.load(name))
    positions = {
        ablation.OURS: "transformer_xl",
        ablation.SHAW: "shaw",
        ablation.VASWANI: "sinusoidal",
        ablation.AL_RFOU: "learned",
    }
    assert config.model.position == positions[row.encoding]
    assert row.recurrence == (config.model.mem_len > 0)
    assert config.train.half_loss == (row.loss == "half")
    assert not row.parent or row.parent in TABLES[number]


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_a_miniature_differs_from_its_parent_as_the_published_row_does(
    number: int, name: str
) -> None:
    parent = TABLES[number][name].parent
    if not parent:
        return
    published = [configs.parse(configs.load(each)) for each in (name, parent)]
    full = differences(*published)
    small = differences(shrunk(number, name), shrunk(number, parent))
    # More layers bring their unrolling; the sizes of a larger model are not kept.
    assert small - full <= {"model.unroll"}
    larger = {"model.dropout", "train.batch_size", "train.num_steps"}
    assert full - small <= larger


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_the_full_scale_is_the_published_config(number: int, name: str) -> None:
    how = TableConfig(table=number, scale="full")
    published = configs.parse(configs.load(name))
    assert table.row_config(name, how, {}) == published
    second = table.row_config(name, how, {}, 1)
    assert differences(second, published) == {"train.seed"}


def test_the_miniature_has_an_eighth_of_the_lengths_and_the_flags_of_the_table() -> (
    None
):
    row = table.row_config(
        *("wt103_shaw", TableConfig()),
        *({"train.num_steps": "80", "train.batch_size": "4"}, 2),
    )
    lengths = (row.model.mem_len, row.train.tgt_len, row.model.n_position)
    assert lengths == (16, 16, 32)
    assert (row.train.num_steps, row.train.batch_size) == (80, 4)
    assert row.train.seed == 1113
    assert (row.optim.warmup_steps, row.checkpoint.every_steps) == (8, 20)


def test_evaluation_attends_to_the_given_length() -> None:
    memory, window = shrunk(6, "wt103_128m"), shrunk(6, "wt103_no_recurrence")
    assert (table.init_len(memory), table.init_len(window)) == (32, 16)
    assert table.lengths(memory) == [16, 24, 32, 48, 64, 80]
    for length in table.lengths(memory):
        how = table.attend(memory, length)
        assert (how.mem_len, how.same_length, how.ext_len) == (length, True, 0)
        how = table.attend(window, length)
        assert (how.mem_len, how.tgt_len + how.ext_len) == (0, length)
    assert table.lengths(shrunk(6, "wt103_al_rfou")) == [16]


# The mode


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces training by made-up numbers, and returns the runs that it made.

    The fourth is interrupted.
    """
    runs: list[str] = []

    def train_and_score(how: TableConfig, row: Config, workdir: Path) -> dict[str, Any]:
        runs.append(f"{workdir.parent.name} {workdir.name}")
        if len(runs) == 4:
            raise Interrupted("ended at update 4", RETRY)
        workdir.mkdir(parents=True, exist_ok=True)
        nll = 2.0 + 0.001 * row.train.seed - 0.1 * (row.model.mem_len > 0)
        return {"nll_nats": {str(n): nll for n in table.lengths(row)}, "tokens": 9}

    monkeypatch.setattr(table, "train_and_score", train_and_score)
    return runs


def test_the_same_command_continues_and_ends_in_the_table(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--rows=wt103_128m,wt103_al_rfou",
        "--seeds=2",
        "--config.train.num_steps=40",
    )
    argv = ["--mode=table", f"--workdir={tmp_path}", *flags]
    assert main(argv) == RETRY
    assert main(argv) == 0
    assert trained == [
        "wt103_128m seed_1111",
        "wt103_128m seed_1112",
        "wt103_al_rfou seed_1111",
        *["wt103_al_rfou seed_1112"] * 2,
    ]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(argv) == 0 and len(trained) == 5
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert {"mode": "table", **json.loads((tmp_path / "table6.json").read_text())} == (
        result
    )
    assert result["outcomes"]["wt103_128m"]["seeds"] == 2
    assert (tmp_path / "table6.png").stat().st_size > 1000
    lines = (tmp_path / "table6.md").read_text("utf-8").splitlines()
    assert "trained for 40 updates of 32 streams on corpus `stdlib`" in lines[0]
    assert lines[4].startswith("| `wt103_128m` | yes | ours | full | 20.")
    assert lines[4].endswith("| 16 | 27.02 | 26.77 | 500 |")
    assert "`wt103_al_rfou` instead of `wt103_128m`" in lines[9]


def test_another_setting_is_another_run(tmp_path: Path, trained: list[str]) -> None:
    config = TableConfig(rows=("wt103_128m",), seeds=1)
    for steps in ("40", "80"):
        table.run(config, tmp_path, {"train.num_steps": steps})
    assert len(trained) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--table=5"], "table.table = 5 must be one of 6, 7, 10"),
        (["--scale=tiny"], "table.scale"),
        (["--rows=wt103_shav"], "did you mean 'wt103_shaw'?"),
        (["--table=7", "--rows=wt103_shaw"], "Table 7 has no row"),
        (["--seeds=0"], "table.seeds = 0"),
        (
            ["--config.train.num_steps=3"],
            "train.num_steps = 3 must be a multiple of the 4",
        ),
        (["--config=quickstart"], "takes no --config"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mode=table", f"--workdir={tmp_path}", *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    row = shrunk(6, "wt103_128m")
    (tmp_path / table.RESULT).write_text("{")
    with pytest.raises(UserError, match="delete it to score the run again"):
        table.finished(TableConfig(), row, tmp_path)


@pytest.mark.long
def test_a_table_is_trained_and_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("segment after segment; " * 2000)
    argv = [
        *("--mode=table", f"--workdir={tmp_path / 'runs'}", "--seeds=2"),
        "--rows=wt103_128m,wt103_no_recurrence,wt103_al_rfou",
        "--config.train.num_steps=40",
        *("--config.data.corpus=text", f"--config.data.path={tmp_path / 'text.txt'}"),
        *(f"--config.data.data_dir={tmp_path / 'data'}", "--config.model.d_model=16"),
    ]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name, one in result["outcomes"].items():
        assert 1 < one["ppl_best"][0] < 20, name
    assert list(result["outcomes"]["wt103_al_rfou"]["ppl_by_attention_tokens"]) == [
        "16"
    ]
    assert main(argv) == 0
    again = capsys.readouterr()
    assert json.loads(again.out.splitlines()[-1]) == result
    assert "fresh run" not in again.err and "resumed" not in again.err
