"""The speed mode: the columns of its table, and its files."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support import tiny
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.paper import speed
from txl_jax.paper.windows import PAPER, count_flops
from txl_jax.report.provenance import environment


def test_a_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER, 6, 363)
    options = EvalConfig(tgt_len=4, streams=2, sweep="mem_len=6")
    model = tiny.config(n_layer=1)
    result = speed.run(Config(model=model, eval=options), tmp_path / "new")
    (row,) = result["rows"]
    ways = ("cached", "sliding", "fair")
    cached, sliding, fair = (row[f"{way}_seconds_per_token"] for way in ways)
    assert min(cached, sliding, fair) > 0
    assert (row["attention_len"], row["paper_ratio"]) == (6, 363)
    assert row["ratio"] == pytest.approx(sliding / cached)
    assert row["fair_ratio"] == pytest.approx(fair / cached)
    flops = count_flops(dataclasses.replace(model, mem_len=6), 2, 4, 6)
    assert row["predicted_fair_ratio"] == pytest.approx(flops["fair"] / flops["cached"])
    assert (result["segments_timed"], result["windows_timed"]) == (12, 6)
    kept = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert kept["rows"] == result["rows"]
    assert {"time", *environment()} == kept["provenance"].keys()
    assert (tmp_path / "new" / "speed.png").read_bytes().startswith(b"\x89PNG")
