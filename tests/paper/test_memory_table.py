"""The table of memories: its rows are comparable, and its runs resume."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.test_main import documented
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import command
from txl_jax.config import Config
from txl_jax.errors import RETRY
from txl_jax.model.memory import Memory
from txl_jax.paper import memory_table
from txl_jax.paper.options import BASE, KINDS, MemoryTask, TableConfig, base
from txl_jax.update.state import abstract_params, parameter_count
from txl_jax.workdir.load import Loaded


@pytest.mark.parametrize("task", ["recall", "wikitext2"])
def test_all_kinds_have_as_many_parameters_and_tokens(task: str) -> None:
    words = 33_278 if task == "wikitext2" else 256
    sizes = {}
    for kind in KINDS:
        row = memory_table.row_config(task, kind, {}, 2)
        model = dataclasses.replace(row.model, vocab_size=words)
        train = row.train
        assert train.batch_size * train.segments_per_update * train.tgt_len == 1024
        assert train.seed == 1113 and row.eval.mem_len == row.model.mem_len
        sizes[kind] = parameter_count(abstract_params(model))
    for size in sizes.values():
        assert size == pytest.approx(sizes[BASE], rel=0.02)


@pytest.mark.parametrize("trained", [2], indirect=True)
def test_an_interrupted_table_resumes(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is interrupted; a result is kept only for the same config."""

    def score(task: MemoryTask, loaded: Loaded, text_T: Any) -> dict[str, Any]:
        far = dict.fromkeys(map(str, task.distances), 0.25)
        row = loaded.config
        nll = 2.0 + 0.01 * (row.train.seed % 2) - 0.1 * (row.model.mem_len > 0)
        return {"nll": nll, "accuracy": 0.5, "accuracies": far}

    def costs(*_: object) -> dict[str, int]:
        return dict.fromkeys(("parameters", "state_bytes", "tokens_per_second"), 2048)

    def load(workdir: Path, row: Config) -> SimpleNamespace:
        return SimpleNamespace(config=row)

    for fake in (score, costs, load):
        monkeypatch.setattr(memory_table, fake.__name__, fake)
    argv = [
        *("--mode=table", "--table=memories", f"--workdir={tmp_path}", "--seeds=2"),
        "--rows=copying_48,recall_96,paper,none",
    ]
    assert command(*argv).status == RETRY
    result = command(*argv).result
    folders = [f"{kind} seed_111{n}" for kind in (BASE, "none") for n in (1, 2)]
    assert trained == [folders[0], folders[1], *folders[1:], *folders]
    assert documented("memories", result)
    rows = result["rows_by_task"]["copying_48"]
    assert rows["none"]["verdict"] == "no verdict: fewer than 3 seeds"
    expected = {"mean": 1.905, "least": 1.9, "most": 1.91}
    assert rows[BASE]["nll"] == pytest.approx(expected)
    assert len(result["cells"]) == 8
    lines = (tmp_path / "memories.md").read_text("utf-8").splitlines()
    assert "| none | 2,048 | 2.0 | 2,048 | 2.0050 (2.0000–2.0100) | 0.500" in (
        "\n".join(lines)
    )
    assert (tmp_path / "memories.png").stat().st_size > 1000
    assert command(*argv).result["cells"] == result["cells"] and len(trained) == 9
    command(*argv, "--config.train.num_steps=8")
    assert len(trained) == 17  # another setting is another run
    damaged = tmp_path / "copying_48" / "none" / "seed_1111" / memory_table.RESULT
    damaged.write_text("{")
    done = command(*argv)
    assert done.status == 2 and f"{damaged} is damaged" in done.err


def test_a_verdict_needs_three_seeds_and_a_difference_above_their_spread() -> None:
    for kind, other in (("longer", BASE), ("fewer_streams", BASE)):
        assert base(kind) == other
    assert base("gradients") == "fewer_streams"
    assert memory_table.judge([-0.2, -0.3, -0.2]) == "better"
    assert memory_table.judge([0.2, 0.3, 0.2]) == "worse"
    assert memory_table.judge([0.1, 0.3, 0.1]) == "no difference"
    assert memory_table.judge([-6e-4, -5e-4, -5e-4]) == "no difference"
    assert "fewer than 3" in memory_table.judge([-0.1, -0.2])
    with refused("Table memories has no row 'pepar' .did you mean 'paper'"):
        TableConfig(table="memories", rows=("pepar",))
    with refused("Table 6 has no row 'stdlib'"):
        TableConfig(rows=("stdlib",))


def test_the_state_of_a_stream_counts_all_arrays() -> None:
    memory: Any = Memory.empty(tiny.CONFIG, 1)
    assert memory_table.state_bytes(tiny.CONFIG) == memory.h_NBMD.nbytes + 4


@pytest.mark.long
def test_a_table_is_trained_and_scored(tmp_path: Path) -> None:
    argv = [
        *("--mode=table", "--table=memories", f"--workdir={tmp_path / 'runs'}"),
        *("--rows=copying_48,stdlib", "--seeds=1", "--config.train.num_steps=8"),
        *("--config.eval.max_tokens=4000", f"--config.data.data_dir={tmp_path}"),
    ]
    result = command(*argv).result
    assert len(result["cells"]) == 2 * len(KINDS)
    for cell in result["cells"]:
        assert 1 < cell["nll"] < 6 and cell["tokens_per_second"] > 0
        assert cell["train_tokens"] == 8 * 1024
        runs = tmp_path / "runs" / cell["task"] / cell["kind"]
        (saved,) = runs.glob(f"seed_*/{memory_table.RESULT}")
        assert json.loads(saved.read_text())["nll"] == cell["nll"]
    state = {x["kind"]: x["state_bytes"] for x in result["cells"]}
    assert state["none"] < state[BASE] < state["longer"]


@pytest.mark.long
def test_fast_weights_recall_from_beyond_the_reach(tmp_path: Path) -> None:
    """They learn it at 96 tokens, without gradients across segments.

    The process has one device, and optimizes its programs.
    """
    argv = [
        *(sys.executable, "-m", "txl_jax.main", "--mode=table", "--table=memories"),
        *(f"--workdir={tmp_path / 'runs'}", f"--config.data.data_dir={tmp_path}"),
        *("--rows=recall_96,fast_weights", "--seeds=1"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    (cell,) = json.loads(done.stdout.splitlines()[-1])["cells"]
    assert cell["accuracies"].keys() == {"48", "96", "192", "384", "768"}
    assert min(cell["accuracies"].values()) > 0.9  # a guess is right once in 8
