"""launch/README.md: its first command runs, and its costs follow from the configs."""

import re
import shlex
from pathlib import Path

import pytest

from tests.launch import world
from tests.promises.test_published_sizes import SIZES, VOCABULARIES
from txl_jax import config as configs
from txl_jax.cli import flags

TEXT = (world.ROOT / "launch/README.md").read_text("utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for cells in re.findall(
        r"^\| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", TEXT, re.M
    )
    if cells[0].startswith("`")
}
V5E_FLOPS = 197e12
REACHED = 0.1


def test_the_first_command_can_be_run_and_fits_the_slice(tmp_path: Path) -> None:
    """The paper's 60 streams do not divide over 16 chips; those of the command do."""
    ((program, *rest),) = [
        shlex.split(line)
        for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)
        for line in block.splitlines()
        if "--spot" in line
    ]
    assert program == "launch/tpu_vm.sh"
    config = flags.parse(rest[rest.index("--") + 1 :]).config
    assert config.train.batch_size % 16 == config.eval.streams % 16 == 0
    result = world.run(world.make(tmp_path), "tpu_vm.sh", "--dry_run", *rest)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ROWS)
def test_costs_follow_from_the_configs(name: str) -> None:
    """Tokens, operations per token and v5e chip hours."""
    parameters, _, row_tokens, row_gflop, row_hours = ROWS[name]
    config = configs.parse(configs.load(name))
    model, train = config.model, config.train
    tokens = train.num_steps * train.batch_size * train.tgt_len
    words = (*model.cutoffs, VOCABULARIES[config.data.corpus])[0]
    keys = train.tgt_len + model.mem_len
    attention = 18 * model.n_layer * model.n_head * model.d_head * keys
    per_token = 6 * SIZES[name][1] + attention + 6 * model.d_model * words
    hours = tokens * per_token / (REACHED * V5E_FLOPS * 3600)
    assert parameters == f"{SIZES[name][0]:,}"
    assert float(row_tokens) == pytest.approx(tokens, rel=0.005)
    assert float(row_gflop) == pytest.approx(per_token / 1e9, rel=0.005)
    assert row_hours == f"{hours:,.0f}"


def test_every_published_model_is_in_the_table() -> None:
    files = (world.ROOT / "experiments").glob("*.py")
    on_a_cpu = {"quickstart", "copying", "shakespeare", "shakespeare_long", "wikitext2"}
    published = {path.stem for path in files} - {"__init__"} - on_a_cpu
    assert set(ROWS) == published
