"""Goodput over restarts, from the totals in metrics.jsonl."""

import datetime
import json
from pathlib import Path

import pytest

from txl_jax.report import goodput


def test_what_no_purpose_took_is_counted_as_restarts(tmp_path: Path) -> None:
    totals = {
        "update": 60.0,
        "input": 1.0,
        "compile": 9.0,
        "checkpoint": 2.0,
        "evaluation": 8.0,
    }
    path = tmp_path / "metrics.jsonl"
    line = {"step": 7, "exact": {}, "timing": {"total_seconds": totals}}
    path.write_text(json.dumps(line) + "\n")
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=100)
    result = goodput.measure(path, start.isoformat())
    assert result["share"] == pytest.approx(0.6, rel=0.02)
    assert result["wall_seconds"] == pytest.approx(100, rel=0.02)
    assert result["seconds"] | {"restart": 0} == totals | {"restart": 0}
    assert result["seconds"]["restart"] == pytest.approx(20, abs=2)


def test_a_run_that_made_no_update_has_none(tmp_path: Path) -> None:
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=5)
    result = goodput.measure(tmp_path / "metrics.jsonl", start.isoformat())
    assert result["share"] == 0
    assert result["seconds"]["restart"] == result["wall_seconds"]
