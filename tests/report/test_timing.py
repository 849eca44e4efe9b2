"""Goodput over restarts, from the totals in metrics.jsonl."""

import datetime
import json
from types import SimpleNamespace

import pytest

from txl_jax.report import timing
from txl_jax.report.timing import goodput

NOW = datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    read = datetime.datetime.fromisoformat
    stopped = SimpleNamespace(now=lambda _: NOW, fromisoformat=read)
    fake = SimpleNamespace(datetime=stopped, UTC=datetime.UTC)
    monkeypatch.setattr(timing, "datetime", fake)


def ago(seconds: float) -> str:
    return (NOW - datetime.timedelta(seconds=seconds)).isoformat()


TOTALS = {"update": 60, "input": 1, "compile": 9, "checkpoint": 2, "evaluation": 8}


@pytest.mark.parametrize(("begun", "shutdown"), [(20, 3 + 5), (4, 3)], ids=str)
def test_unaccounted_time_is_shutdown_and_restart(begun: int, shutdown: int) -> None:
    """The newest line is 5 seconds old, and may be of the start before this one."""
    timing = {"total_seconds": TOTALS, "time": ago(5)}
    line = json.dumps({"step": 7, "exact": {}, "timing": timing}).encode()
    starts = [{"time": ago(100)}, {"time": ago(begun)}]
    earlier = {"seconds": TOTALS | {"shutdown": 3, "restart": 7}}
    result = goodput([line], {"starts": starts, "goodput": earlier})
    assert (result["share"], result["wall_seconds"]) == (0.6, 100)
    rest = {"shutdown": shutdown, "restart": 20 - shutdown}
    assert result["seconds"] == TOTALS | rest


def test_a_run_without_updates_has_no_goodput() -> None:
    result = goodput([], {"starts": [{"time": ago(5)}]})
    assert result["share"] == 0
    assert result["seconds"]["restart"] == result["wall_seconds"]
