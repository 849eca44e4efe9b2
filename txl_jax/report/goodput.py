"""Goodput: the share of a run's wall-clock time that its updates took."""

import datetime
import json
from pathlib import Path
from typing import Any

from txl_jax.report.log import whole_lines
from txl_jax.report.timing import PURPOSES

SHUTDOWN = "shutdown"


def measure(metrics: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Returns the goodput of a run since its first start, over all restarts.

    metrics: the run's metrics.jsonl, whose newest line has the seconds of each purpose.
    run: its run.json, with the goodput at the end of an earlier start. What follows the
    newest line is this start's shutdown. The remaining seconds are those of restarts:
    start-up, downtime, and the updates since the last checkpoint, which a killed run
    repeats.
    """
    first, last = (
        datetime.datetime.fromisoformat(run["starts"][index]["time"])
        for index in (0, -1)
    )
    now = datetime.datetime.now(datetime.UTC)
    before = run.get("goodput", {}).get("seconds", {})
    totals = dict.fromkeys(PURPOSES, 0.0) | {SHUTDOWN: before.get(SHUTDOWN, 0.0)}
    lines, _ = whole_lines(metrics, 2**62)
    if lines:
        timing = json.loads(lines[-1]).get("timing", {})
        totals |= timing.get("total_seconds", {})
        written = datetime.datetime.fromisoformat(
            timing.get("time", run["starts"][-1]["time"])
        )
        if written > last:
            totals[SHUTDOWN] += (now - written).total_seconds()
    wall = (now - first).total_seconds()
    seconds = totals | {"restart": max(wall - sum(totals.values()), 0.0)}
    return {
        "share": totals["update"] / wall if wall > 0 else 0.0,
        "wall_seconds": wall,
        "seconds": seconds,
    }
