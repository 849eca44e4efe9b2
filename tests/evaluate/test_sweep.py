"""A sweep reads what it is told, and finds the shortest length that is the best."""

import json
from pathlib import Path
from typing import Any

import pytest

from txl_jax.errors import UserError
from txl_jax.evaluate import sweep
from txl_jax.evaluate.perplexity import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.step import TrainConfig


@pytest.mark.parametrize(
    "text, values",
    [
        ("mem_len=0:4000:2000", (0, 2000, 4000)),
        ("mem_len=0:9:4", (0, 4, 8)),
        ("ext_len=7,3,7", (3, 7)),
        ("clamp_len=0,400,20", (20, 400, 0)),
        ("same_length=true,false", (False, True)),
        ("sliding_window=64", (64,)),
    ],
)
def test_reads(text: str, values: tuple[int, ...]) -> None:
    assert sweep.parse(text) == sweep.Sweep(text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text, line",
    [
        ("memlen=1,2", "did you mean 'mem_len'"),
        ("mem_len", "is not of the form mem_len=START:STOP:STEP"),
        ("mem_len=0:9", "is not of the form"),
        ("mem_len=0:9:0", "is not of the form"),
        ("mem_len=9:0:3", "is not of the form"),
        ("mem_len=-1,2", "is not of the form"),
        ("same_length=1", "same_length=false,true"),
    ],
)
def test_refuses_in_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        EvalConfig(sweep=text)
    assert "\n" not in str(refused.value)


def test_training_has_its_own_value() -> None:
    model = ModelConfig(mem_len=5, clamp_len=6)
    train = TrainConfig(tgt_len=7)
    fields = ("mem_len", "clamp_len", "same_length", "tgt_len", "sliding_window")
    found = [sweep.trained(model, train, field) for field in fields]
    assert found == [5, 6, False, 7, 7]
    assert sweep.parse("mem_len=1,9").including(5).values == (1, 5, 9)


def test_no_memory_needs_no_same_length() -> None:
    how = EvalConfig(same_length=True)
    swept = sweep.parse("mem_len=0,8")
    assert not swept.at(how, 0).same_length
    assert (swept.at(how, 8).same_length, swept.at(how, 8).mem_len) == (True, 8)


PPL = {0: 30.0, 100: 27.02, 200: 26.7749, 300: 26.7712, 400: 26.7701, 500: 26.9}


def evaluate(value: int) -> dict[str, Any]:
    scores = dict.fromkeys(("nll", "bpc", "tokens", "cold_tokens", "seconds"), 1.0)
    return {**scores, "ppl": PPL[value], "other": 0}


def test_the_columns_are_table_6s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = sweep.parse("mem_len=0:500:200")
    result = sweep.run(swept, 100, tmp_path, evaluate)
    # 26.7712 and 26.7701 are 26.77 in the table, 26.7749 too.
    columns = [result[key] for key in ("init", "ppl_init", "ppl_best", "shortest")]
    assert columns == [100, 27.02, 26.7701, 200]
    assert [row["mem_len"] for row in result["rows"]] == [0, 100, 200, 400]
    kept = json.loads((tmp_path / "sweep_mem_len.json").read_text())
    assert {**kept, "picture": 0, "file": 0} == {**result, "picture": 0, "file": 0}
    assert (tmp_path / "sweep_mem_len.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "mem_len = 100: ppl 27.02, 1.0000 bits per token (2 of 4)"
    assert "at best 26.77, reached at 200" in lines[-1]
