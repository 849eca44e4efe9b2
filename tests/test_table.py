"""The paper's ablation tables: rows, how they compare, and that nothing is done twice.

Training is a stand-in here but for one long test: nothing else compiles.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_jax import ablation, outcome, table
from txl_jax import config as configs
from txl_jax.ablation import TABLES, TableConfig
from txl_jax.config import Config
from txl_jax.errors import AGAIN, Interrupted, UserError
from txl_jax.main import main

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
def test_a_row_says_what_its_config_is(number: int, name: str) -> None:
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
def test_a_miniature_differs_from_its_parent_in_what_the_published_do(
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
        "wt103_shaw", TableConfig(steps=80), {"train.batch_size": "4"}, 2
    )
    lengths = (row.model.mem_len, row.train.tgt_len, row.model.n_position)
    assert lengths == (16, 16, 32)
    assert (row.train.num_steps, row.train.batch_size) == (80, 4)
    assert row.train.seed == 1113
    assert (row.optim.warmup_steps, row.checkpoint.every_steps) == (8, 20)


def test_attention_has_the_length_that_is_asked() -> None:
    memory, window = shrunk(6, "wt103_128m"), shrunk(6, "wt103_no_recurrence")
    assert (table.init_len(memory), table.init_len(window)) == (32, 16)
    assert table.lengths(memory) == [16, 24, 32, 48, 64, 80]
    for length in table.lengths(memory):
        how = table.attend(memory, length)
        assert (how.mem_len, how.same_length, how.ext_len) == (length, True, 0)
        how = table.attend(window, length)
        assert (how.mem_len, how.tgt_len + how.ext_len) == (0, length)
    assert table.lengths(shrunk(6, "wt103_al_rfou")) == [16]


# Comparisons


def made(*ppl: float, longer: float = 1.0) -> outcome.Outcome:
    """Returns an outcome: each seed's perplexity; 32 tokens have `longer` times it."""
    nlls = [{16: float(np.log(x)), 32: float(np.log(x * longer))} for x in ppl]
    return outcome.summarise(nlls, 16)


def test_the_shortest_length_that_reaches_the_best_is_found() -> None:
    nlls = [{16: np.log(30.0), 32: np.log(20.0), 48: np.log(19.999), 64: np.log(21.0)}]
    found = outcome.summarise(nlls, 16)
    assert found.best_len == 32
    assert found.init.mean == pytest.approx(30)
    assert found.best.mean == pytest.approx(20)
    assert found.gain.mean == pytest.approx(10)


def verdicts(**rows: outcome.Outcome) -> dict[str, str]:
    compared = outcome.compare(6, rows)
    return {each.what.split("`")[1]: each.verdict for each in compared[: len(rows) - 1]}


def test_less_than_the_spread_is_no_difference() -> None:
    first = made(10.0, 10.2, 10.4)
    assert verdicts(wt103_128m=first, wt103_shaw=made(10.5, 10.55, 10.6)) == {
        "wt103_shaw": "no difference"
    }
    assert verdicts(wt103_128m=first, wt103_shaw=made(10.7, 10.7, 10.7)) == {
        "wt103_shaw": "as the paper"
    }
    assert verdicts(wt103_128m=first, wt103_shaw=made(9.5, 9.5, 9.5)) == {
        "wt103_shaw": "against the paper"
    }
    assert (
        "one seed" in verdicts(wt103_128m=made(1.0), wt103_shaw=made(2.0))["wt103_shaw"]
    )


def test_a_row_is_compared_with_the_nearest_above_that_was_made() -> None:
    one, other = made(10.0, 10.1), made(12.0, 12.1)
    found = outcome.compare(6, {"wt103_no_recurrence": one, "wt103_vaswani": other})
    assert found[0].what == "`wt103_vaswani` instead of `wt103_no_recurrence`"
    assert found[0].cost == pytest.approx(2.0)
    assert found[0].paper == pytest.approx(30.97 - 29.02)


def test_longer_attention_is_compared_within_each_run() -> None:
    # The seeds lie far apart, and yet each gains 2 %.
    found = outcome.compare(6, {"wt103_128m": made(10.0, 12.0, longer=0.98)})
    assert found[0].cost == pytest.approx(-0.22)
    assert found[0].spread == pytest.approx(0.04)
    assert found[0].verdict == "as the paper"
    none = outcome.compare(6, {"wt103_128m": made(10.0, 12.0, longer=1.1)})
    assert none[0].verdict == "no difference"


# The whole


def learner(calls: list[str]) -> table.Learn:
    """Returns a training that notes its runs in `calls` and makes up their numbers."""

    def learn(row: Config, folder: Path, conclude: Any) -> table.Done:
        calls.append(f"{folder.parent.name} {folder.name}")
        if len(calls) == 4:
            raise KeyboardInterrupt
        folder.mkdir(parents=True)
        nll = 2.0 + 0.001 * row.train.seed - 0.1 * (row.model.mem_len > 0)
        return {"nll_nats": {str(n): nll for n in table.lengths(row)}, "tokens": 9}

    return learn


def test_the_same_command_goes_on_and_ends_in_the_table(tmp_path: Path) -> None:
    how = TableConfig(rows=("wt103_128m", "wt103_al_rfou"), seeds=2, steps=40)
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        table.run(how, tmp_path, {}, learner(calls))
    result = table.run(how, tmp_path, {}, learner(calls))
    assert calls == [
        "wt103_128m seed_1111",
        "wt103_128m seed_1112",
        "wt103_al_rfou seed_1111",
        *["wt103_al_rfou seed_1112"] * 2,
    ]
    again = table.run(how, tmp_path, {}, learner(calls))
    assert again == result and len(calls) == 5
    assert json.loads((tmp_path / "table6.json").read_text()) == json.loads(
        json.dumps(result)
    )
    assert result["outcomes"]["wt103_128m"]["seeds"] == 2
    assert (tmp_path / "table6.png").stat().st_size > 1000
    lines = (tmp_path / "table6.md").read_text("utf-8").splitlines()
    assert "trained for 40 updates of 32 streams on corpus `stdlib`" in lines[0]
    assert lines[4].startswith("| `wt103_128m` | yes | ours | full | 20.")
    assert lines[4].endswith("| 16 | 27.02 | 26.77 | 500 |")
    assert "`wt103_al_rfou` instead of `wt103_128m`" in lines[9]
    # Another number of steps is another run.
    table.run(
        dataclasses.replace(how, steps=80, seeds=1), tmp_path / "b", {}, learner([])
    )
    more = dataclasses.replace(how, scored=5, rows=("wt103_128m",), seeds=1)
    with pytest.raises(FileExistsError):
        table.run(more, tmp_path, {}, learner([]))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--table=5"], "table.table = 5 is no ablation; known: 6, 7, 10"),
        (["--scale=tiny"], "table.scale"),
        (["--rows=wt103_shav"], "did you mean 'wt103_shaw'?"),
        (["--table=7", "--rows=wt103_shaw"], "Table 7 has no row"),
        (["--seeds=0"], "table.seeds = 0"),
        (["--steps=3"], "train.num_steps = 3 must be a multiple of the 4"),
        (["--config=quickstart"], "makes a workdir's config itself"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mode=table", f"--workdir={tmp_path}", *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_a_signal_in_a_run_ends_the_table_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(row: Config, folder: Path, conclude: Any) -> table.Done:
        raise Interrupted("ended at update 4, which is saved; the same command goes on")

    monkeypatch.setattr("txl_jax.modes.learn", learn)
    assert main(["--mode=table", f"--workdir={tmp_path}"]) == AGAIN


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
        *("--mode=table", f"--workdir={tmp_path / 'runs'}", "--seeds=2", "--steps=40"),
        *("--rows=wt103_128m,wt103_no_recurrence,wt103_al_rfou", "--scored=1000"),
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
