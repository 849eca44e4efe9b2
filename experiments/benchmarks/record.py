"""The JSON line of a benchmark, files of such rows, and the pages made from them."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks.quiet import LoadedError, Timing, Watch
from experiments.figures import program
from txl_jax.errors import UserError
from txl_jax.report.provenance import LIBRARIES, describe_processor, git_revision

Row = dict[str, Any]
Measure = Callable[[argparse.Namespace, Watch], dict[str, Any]]


def positive(text: str) -> int:
    """Parses a positive integer."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help keeps the lines of the docstring."""
    parser = program.make_parser(None)
    parser.description = description
    return parser


def make_parser(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all comparisons share."""
    parser = plain_parser(description)
    parser.add_argument(
        "--repeats", type=positive, default=repeats, help="repetitions of each program"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help='report on a loaded machine, too, with "loaded": true',
    )
    parser.add_argument(
        "--tiny", action="store_true", help="use a tiny model, to try the program"
    )
    return parser


def case(
    name: str, tokens: int, timings: dict[str, Timing], **further: dict[str, Any]
) -> dict[str, Any]:
    """Returns the results of one case, for all of its sides.

    further: further results by side. With two sides, ratio is the second's median time
    divided by the first's.
    """
    sides = {
        side: timing.describe(tokens) | further.get(side, {})
        for side, timing in timings.items()
    }
    result: dict[str, Any] = {"case": name, "sides": sides}
    if len(timings) == 2:
        ours, peer = timings.values()
        result["ratio"] = round(peer.median / ours.median, 3)
    return result


def versions() -> dict[str, str]:
    """Returns the versions of the installed libraries."""
    installed = {"python": platform.python_version()}
    for name in (*LIBRARIES, "torch", "transformers"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a .jsonl file, which may be missing."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # half a line, after a kill
            continue
    return rows


def append(path: Path, row: Row) -> None:
    """Adds a row to a .jsonl file."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(row) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table; cells that a row lacks are empty."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [*row, *[""] * (len(head) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def provenance() -> dict[str, Any]:
    """Returns the date, and the code, libraries and device that measure."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": versions(),
        "cpu_count": os.cpu_count(),
        "processor": describe_processor(),
        "device_kind": jax.devices()[0].device_kind,
    }


def run(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Measure,
    argv: list[str] | None,
) -> int:
    """Prints the result; refuses a machine that is loaded."""
    flags = sys.argv[1:] if argv is None else argv
    command = ["python", "-m", f"experiments.benchmarks.{name}", *flags]

    def watched(args: argparse.Namespace) -> dict[str, Any]:
        try:
            watch = Watch(args.force)
            measured = measure(args, watch)
        except LoadedError as loaded:
            raise UserError(f"{name}: not measured: {loaded} (--force)") from loaded
        return {
            "benchmark": name,
            **measured,
            "tiny": args.tiny,
            **watch.describe(),
            "load_average_after": round(os.getloadavg()[0], 2),
            "command": shlex.join(command),
            **provenance(),
        }

    return program.run(parser, watched, argv)
