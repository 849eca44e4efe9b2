"""The configs of a table's rows, published and in miniature."""

import pytest

from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.paper import options as ablation
from txl_jax.paper import table_rows
from txl_jax.paper.options import TABLES, TableConfig

ROWS = [(number, name) for number, rows in TABLES.items() for name in rows]


def shrunk(number: str, name: str) -> Config:
    return table_rows.row_config(name, TableConfig(table=number), {})


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
    row, config = TABLES[number][name], configs.parse(configs.load(name))
    assert config.model.position == POSITIONS[row.encoding]
    assert row.recurrence == (config.model.mem_len > 0)
    assert config.train.half_loss == (row.loss == "half")
    full = TableConfig(table=number, scale="full")
    assert table_rows.row_config(name, full, {}) == config
    second = table_rows.row_config(name, full, {}, 1)
    assert differences(second, config) == {"train.seed"}
    if row.parent:  # the miniatures differ as the published configs do
        published = differences(config, configs.parse(configs.load(row.parent)))
        small = differences(shrunk(number, name), shrunk(number, row.parent))
        # More layers bring their unrolling; the sizes of a larger model are not kept.
        assert small - published <= {"model.unroll"}
        larger = {"model.dropout", "train.batch_size", "train.num_steps"}
        assert published - small <= larger and row.parent in TABLES[number]


def test_a_miniature_has_an_eighth_of_the_lengths_and_takes_overrides() -> None:
    flags = {"train.num_steps": "80", "train.batch_size": "4"}
    row = table_rows.row_config("wt103_shaw", TableConfig(), flags, 2)
    lengths = (row.model.mem_len, row.train.tgt_len, row.model.n_position)
    assert lengths == (16, 16, 32)
    assert (row.train.num_steps, row.train.batch_size) == (80, 4)
    assert (row.train.seed, row.eval.max_tokens) == (1113, table_rows.SCORED)
    assert (row.optim.warmup_steps, row.checkpoint.every_steps) == (8, 20)


def test_every_token_attends_to_the_given_length() -> None:
    memory, window = shrunk("6", "wt103_128m"), shrunk("6", "wt103_no_recurrence")
    assert (table_rows.init_len(memory), table_rows.init_len(window)) == (32, 16)
    assert table_rows.lengths(memory) == [16, 24, 32, 48, 64, 80]
    for length in table_rows.lengths(memory):
        config = table_rows.attend(memory, length)
        assert (config.mem_len, config.same_length, config.ext_len) == (length, True, 0)
    assert table_rows.lengths(window) == [8, 12, 16, 24, 32, 40]
    for length in table_rows.lengths(window):
        config = table_rows.attend(window, length)
        assert (config.mem_len, config.tgt_len + config.ext_len) == (0, length)
    assert table_rows.lengths(shrunk("6", "wt103_al_rfou")) == [8, 12, 16]
    one = {"train.tgt_len": "1"}
    shortest = table_rows.row_config("wt103_no_recurrence", TableConfig(), one)
    assert min(table_rows.lengths(shortest)) == 1  # the token that is scored


@pytest.mark.parametrize(
    ("name", "overrides", "clamp_len"),
    [
        ("wt103_128m", {}, 31),  # the largest distance in training
        ("wt103_128m", {"train.tgt_len": "32", "model.mem_len": "64"}, 95),
        ("wt103_128m", {"train.tgt_len": "32", "eval.clamp_len": "7"}, 7),
        ("wt103_no_recurrence", {}, 15),
        ("wt103_shaw", {}, 0),  # a table's last row serves all greater distances
        ("wt103_vaswani", {}, 0),
    ],
)
def test_clamped_lengths(name: str, overrides: dict[str, str], clamp_len: int) -> None:
    row = table_rows.row_config(name, TableConfig(), overrides)
    assert row.eval.clamp_len == clamp_len
