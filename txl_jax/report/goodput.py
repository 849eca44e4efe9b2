"""Goodput: the share of a run's wall-clock time that its updates took."""

import datetime
import json
from pathlib import Path
from typing import Any

from txl_jax.report.log import whole_lines
from txl_jax.report.timing import PURPOSES


def measure(metrics: Path, first_start: str) -> dict[str, Any]:
    """Returns the goodput of a run since its first start, over all restarts.

    metrics: the run's metrics.jsonl, whose newest line has the seconds of each purpose.
    The remaining seconds are those of restarts: start-up, downtime, and the updates
    since the last checkpoint, which a killed run repeats.
    """
    lines = whole_lines(metrics, 2**62)
    totals = dict.fromkeys(PURPOSES, 0.0)
    if lines:
        totals |= json.loads(lines[-1]).get("timing", {}).get("total_seconds", {})
    now = datetime.datetime.now(datetime.UTC)
    wall = (now - datetime.datetime.fromisoformat(first_start)).total_seconds()
    seconds = totals | {"restart": max(wall - sum(totals.values()), 0.0)}
    return {
        "share": totals["update"] / wall if wall > 0 else 0.0,
        "wall_seconds": wall,
        "seconds": seconds,
    }
