"""The table of memories: its rows are comparable, and its runs resume.

Dims: T tokens of a text.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_main import documented
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import command
from txl_jax.config import Config
from txl_jax.errors import RETRY
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.paper import memory_table
from txl_jax.paper.options import BASE, KINDS, TableConfig, base
from txl_jax.update.state import abstract_params, parameter_count


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

    def measure(task: str, row: Config, *_: object) -> dict[str, Any]:
        nll = 2.0 + 0.01 * (row.train.seed % 2) - 0.1 * (row.model.mem_len > 0)
        costs = ("parameters", "state_bytes", "train_step_bytes", "tokens_per_second")
        return {"nll": nll, "accuracy": 0.5, **dict.fromkeys(costs, 2048)}

    monkeypatch.setattr(memory_table, "measure", measure)
    argv = [
        *("--mode=table", "--table=memories", f"--workdir={tmp_path}", "--seeds=2"),
        "--rows=copying_48,paper,none,cache",
    ]
    assert command(*argv).status == RETRY
    result = command(*argv).result
    folders = [f"{kind} seed_111{n}" for kind in (BASE, "none") for n in (1, 2)]
    assert trained == [folders[0], folders[1], *folders[1:], *folders[:2]]
    assert documented("memories", result)
    rows = result["rows_by_task"]["copying_48"]
    assert rows["none"]["verdict"] == "no verdict: fewer than 3 seeds"
    expected = {"mean": 1.905, "least": 1.9, "most": 1.91}
    assert rows[BASE]["nll"] == pytest.approx(expected)
    assert len(result["cells"]) == 6
    lines = (tmp_path / "memories.md").read_text("utf-8").splitlines()
    assert "| none | 2,048 | 2.0 | 2,048 | 0.0 | 2.0050 (2.0000–2.0100) | 0.500" in (
        "\n".join(lines)
    )
    assert (tmp_path / "memories.png").stat().st_size > 1000
    assert command(*argv).result["cells"] == result["cells"] and len(trained) == 7
    command(*argv, "--config.train.num_steps=8")
    assert len(trained) == 13  # another setting is another run
    damaged = tmp_path / "copying_48" / "none" / "seed_1111" / "none.json"
    damaged.write_text("{}")
    done = command(*argv)
    assert done.status == 2 and f"{damaged} is damaged" in done.err


def test_a_verdict_needs_three_seeds_and_a_difference_above_their_spread() -> None:
    for kind, other in (("cache", BASE), ("fewer_streams", BASE)):
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


def test_tokens_are_scored_in_the_order_of_the_text() -> None:
    """There are three streams, each of which starts cold."""
    params, text_T = tiny.make_params(), tiny.make_tokens(1, 40)[0]
    loaded = tiny.loaded(params)
    options = EvalConfig(streams=3, tgt_len=4, mem_len=64)
    nll_T, right_T = memory_table.score_tokens(loaded, options, text_T, True)
    assert right_T is not None and right_T.any() and not right_T.all()
    parts = [text_T[n : n + 14] for n in (0, 13, 26)]
    expected = np.concatenate([tiny.cold_nll(tiny.CONFIG, params, x) for x in parts])
    tiny.assert_close(nll_T, expected)


def test_a_cache_is_tuned_on_what_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    text_T = np.frombuffer(b"0AB12>ab", np.uint8)

    def score(_: object, options: EvalConfig, *__: object) -> tuple[Any, None]:
        is_answer_T = text_T[1:] >= ord("a")
        weight, theta = options.cache_weight, options.cache_theta
        return np.where(is_answer_T, weight + theta, -3 * weight), None

    monkeypatch.setattr(memory_table, "score_tokens", score)
    options, loaded = EvalConfig(cache_len=9, cache_weight=0.1), tiny.loaded()
    for answers, weight in ((True, 0.05), (False, 0.5)):
        found = memory_table.tune(loaded, options, text_T, answers)
        assert (found.cache_weight, found.cache_theta) == (weight, 0.03)


def test_second_occurrences_of_identifiers() -> None:
    text = b"def first(other): return first; other = other + import + first # import"
    assert [text[slice(*x)] for x in memory_table.repeated(text, 10)] == [
        b"first",
        b"other",
    ]
    assert memory_table.repeated(text, 21) == [(32, 37)]


def test_the_state_of_a_stream_counts_all_arrays() -> None:
    memory: Any = choose_kind(tiny.CONFIG).empty(1)
    expected = memory.h_NBMD.nbytes + 4
    assert memory_table.state_bytes(tiny.CONFIG, EvalConfig()) == expected
    cache = EvalConfig(cache_len=9, cache_weight=0.1)
    expected += 9 * 4 * (tiny.D + 1)
    assert memory_table.state_bytes(tiny.CONFIG, cache) == expected


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
        saved = tmp_path / "runs" / cell["task"] / memory_table.trained_as(cell["kind"])
        (found,) = saved.glob(f"seed_*/{cell['kind']}.json")
        assert json.loads(found.read_text())["found"]["nll"] == cell["nll"]
    state = {x["kind"]: x["state_bytes"] for x in result["cells"]}
    assert state["none"] < state[BASE] < state["cache"]


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
