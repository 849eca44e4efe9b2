"""What a benchmark prints: one JSON line with its numbers and where they come from."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jax

from experiments.benchmarks.quiet import LoadedError, Timing, Watch
from txl_jax import allocator
from txl_jax.report.provenance import LIBRARIES, git_revision

Measure = Callable[[argparse.Namespace, Watch], dict[str, Any]]


def positive(text: str) -> int:
    """Returns a flag's text as a whole number above 0."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def make_parser(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Returns the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=positive, default=repeats, help="of each program"
    )
    parser.add_argument(
        "--force", action="store_true", help='report all the same, as "loaded": true'
    )
    parser.add_argument(
        "--tiny", action="store_true", help="try the program out on a model of no size"
    )
    return parser


def case(
    name: str, tokens: int, timings: dict[str, Timing], **more: dict[str, Any]
) -> dict[str, Any]:
    """Returns what was measured of two sides that do the same, or of one alone.

    ratio: how many times faster the first is. `more`: what else is known of a side.
    """
    sides = {
        side: timing.describe(tokens) | more.get(side, {})
        for side, timing in timings.items()
    }
    found: dict[str, Any] = {"case": name, "sides": sides}
    if len(timings) == 2:
        ours, peer = timings.values()
        found["ratio"] = round(peer.median / ours.median, 3)
    return found


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run(name: str, given: argparse.Namespace, measure: Measure) -> None:
    """Prints what is measured, or exits with status 2 where the machine is loaded."""
    allocator.keep_freed()  # as `txl_jax.main` does
    try:
        watch = Watch(given.force)
        found = measure(given, watch)
    except LoadedError as loaded:
        print(f"{name}: not measured: {loaded} (--force)", file=sys.stderr)
        raise SystemExit(2) from None
    command = ["python", "-m", f"experiments.benchmarks.{name}", *sys.argv[1:]]
    result = {
        "benchmark": name,
        **found,
        "tiny": given.tiny,
        **watch.describe(),
        "load_average_after": round(os.getloadavg()[0], 2),
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": versions(),
        "cpu_count": os.cpu_count(),
        "device_kind": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))
