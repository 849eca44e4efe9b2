"""Runs all comparisons in sequence and prints a Markdown table.

    python -m experiments.benchmarks.compare [--only=step ..] [--jsonl=FILE]

Every benchmark loads the machine, so the next one waits until it is quiet again. If a
benchmark is not measured, its reason goes to stderr and the exit status is 2.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks import quiet, record
from experiments.figures import program
from txl_jax.errors import refuse

PROGRAMS = {
    "evaluation": [],
    "generation": [],
    "step": [],
    "step, xla": ["--kernel=xla"],
}
HEADER = (
    "| benchmark | case | side | tokens/s | seconds | spread | memory MiB | ratio |"
)
LONGEST_WAIT = 600.0  # seconds


def wait_for_quiet() -> None:
    """Waits until the load average has fallen, for at most LONGEST_WAIT."""
    until = time.monotonic() + LONGEST_WAIT
    while os.getloadavg()[0] > quiet.MOST_LOAD and time.monotonic() < until:
        time.sleep(5)


def run(name: str, flags: list[str]) -> dict[str, Any] | None:
    """Returns the JSON result of a benchmark, or None if it was not measured."""
    module = f"experiments.benchmarks.{name.partition(',')[0]}"
    command = [sys.executable, "-m", module, *PROGRAMS[name], *flags]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def table_rows(name: str, result: dict[str, Any]) -> list[str]:
    """Returns one row for each side of each case; the first side has the ratio."""
    rows = []
    mark = " (loaded)" if result["loaded"] else ""
    for case in result["cases"]:
        ratio = case.get("ratio", "")
        for side, numbers in case["sides"].items():
            memory = numbers.get("temporary_bytes")
            cells = [
                name + mark,
                case["case"],
                side,
                numbers.get("tokens_per_second", ""),
                numbers["median_seconds"],
                numbers["spread"],
                "" if memory is None else round(memory / 2**20, 1),
                ratio,
            ]
            rows.append(f"| {' | '.join(map(str, cells))} |")
            ratio = ""
    return rows


def compare(args: argparse.Namespace) -> None:
    """Prints the table, and appends the results to a file."""
    flags = [f"--{name}" for name in ("force", "tiny") if getattr(args, name)]
    if args.repeats:
        flags.append(f"--repeats={args.repeats}")
    print(f"{HEADER}\n|{'---|' * HEADER.count(' | ')}---|", flush=True)
    refused = False
    for name in args.only:
        if not args.force:
            wait_for_quiet()
        result = run(name, flags)
        if result is None:
            refused = True
            continue
        print(*table_rows(name, result), sep="\n", flush=True)
        if args.jsonl:
            with args.jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    refuse(refused, "some benchmarks are not measured, for the reasons above")


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    names = list(PROGRAMS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, help="repetitions of each program")
    parser.add_argument(
        "--force", action="store_true", help="measure on a loaded machine, too"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny models, to try the programs"
    )
    parser.add_argument(
        "--jsonl", type=program.path, help="append the JSON lines to this file"
    )
    return program.run(parser, compare, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
