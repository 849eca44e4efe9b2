"""All comparisons one after the other, as a Markdown table on stdout.

    python -m experiments.benchmarks.compare [--only=step ..] [--jsonl=FILE]

A benchmark is itself a load, so each waits for the machine to be quiet again. What is
not measured has its reason on stderr, and the status is then 2.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks import quiet

PROGRAMS = {
    "evaluation": [],
    "generation": [],
    "step": [],
    "step, xla": ["--kernel=xla"],
    "softmax": [],
    "attention": [],
    "compile_time": [],
}
HEADER = (
    "| benchmark | case | side | tokens/s | seconds | spread | memory MiB | ratio |"
)
LONGEST_WAIT = 600.0  # seconds


def wait_for_quiet() -> None:
    """Returns when the load average has fallen, or has had time enough to."""
    until = time.monotonic() + LONGEST_WAIT
    while os.getloadavg()[0] > quiet.MOST_LOAD and time.monotonic() < until:
        time.sleep(5)


def run(name: str, flags: list[str]) -> dict[str, Any] | None:
    """Returns what a benchmark of PROGRAMS prints, or None where it refuses."""
    module = f"experiments.benchmarks.{name.partition(',')[0]}"
    command = [sys.executable, "-m", module, *PROGRAMS[name], *flags]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def table_rows(name: str, result: dict[str, Any]) -> list[str]:
    """Returns a row per side of each case; the ratio stands at the first."""
    rows = []
    mark = " (loaded)" if result["loaded"] else ""
    for case in result["cases"]:
        ratio = case.get("ratio", "")
        for side, found in case["sides"].items():
            memory = found.get("temporary_bytes")
            cells = [
                name + mark,
                case["case"],
                side,
                found.get("tokens_per_second", ""),
                found["median_seconds"],
                found["spread"],
                "" if memory is None else round(memory / 2**20, 1),
                ratio,
            ]
            rows.append(f"| {' | '.join(map(str, cells))} |")
            ratio = ""
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(PROGRAMS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, help="of each program")
    parser.add_argument("--force", action="store_true", help="on a loaded machine too")
    parser.add_argument("--tiny", action="store_true", help="try the programs out")
    parser.add_argument("--jsonl", type=Path, help="where to add the JSON lines")
    given = parser.parse_args()
    flags = [f"--{name}" for name in ("force", "tiny") if getattr(given, name)]
    if given.repeats:
        flags.append(f"--repeats={given.repeats}")
    print(f"{HEADER}\n|{'---|' * HEADER.count(' | ')}---|", flush=True)
    refused = False
    for name in given.only:
        if not given.force:
            wait_for_quiet()
        result = run(name, flags)
        if result is None:
            refused = True
            continue
        print(*table_rows(name, result), sep="\n", flush=True)
        if given.jsonl:
            with given.jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    raise SystemExit(2 if refused else 0)


if __name__ == "__main__":
    main()
