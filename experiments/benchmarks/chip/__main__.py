"""The first contact with a chip: what it is, what works on it, and how fast.

    python -m experiments.benchmarks.chip [--minutes=20] [--out=runs/chip]

Measures all TPUs or GPUs of one machine, or its CPU: peak rates, the errors of every
attention kernel, and training, evaluation and generation with the published configs,
beside PyTorch where it sees the same device (extra bench). Each part runs in a process
of its own with a time limit, so that an out-of-memory, a crash or a hang is a row of
the report. The same command continues with the parts that are left; rows of other code,
libraries or devices are measured again.

--out gets rows.jsonl and page.md. The last line on stdout is a JSON object.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks import record
from experiments.benchmarks.chip import page, plan, process, rows
from txl_jax.report.log import say


def measure_all(args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Returns the rows of all parts; a part that was not reached has none."""
    load = round(os.getloadavg()[0], 2)
    first = {"part": "machine", "tiny": args.tiny}
    machine = process.run(first, plan.LIMITS["machine"])
    if "device_kind" not in machine["result"]:
        raise SystemExit(f"chip: no device was found: {machine['error']}")
    facts = machine["result"]
    file = rows.File(args.out / "rows.jsonl", facts, args.retry)
    file.add(machine | {"load_average": load})
    parts = plan.plan(facts, args.tiny)
    for number, part in enumerate(parts, 1):
        if file.find(part):
            continue
        left, limit = until - time.monotonic(), plan.LIMITS[part["part"]]
        if left < min(limit, args.least):
            continue
        say(f"{number} of {len(parts)}: {plan.title(part)}")
        row = process.run(part, min(limit, left))
        if row["error"]:
            say(f"    {row['error']}")
        if row["timed_out"] and left < limit:
            continue  # the next run gives it the whole limit
        file.add(row | {"load_average": round(os.getloadavg()[0], 2)})
    return [file.find(part) or {**part, "left": True} for part in [first, *parts]]


def summary(found: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the result, without the rows that rows.jsonl has."""
    done = [row for row in found if "left" not in row]
    facts = done[0]["result"]
    return {
        "benchmark": "chip",
        **{name: facts[name] for name in ("device_kind", "count", "versions")},
        "parts": len(found),
        "left": len(found) - len(done),
        "failed": [plan.title(row) for row in done if row["error"]],
        "faults": [row["result"]["fault"] for row in done if rows.is_fault(row)],
        "tokens_per_second": {
            plan.title(row): round(row["result"]["tokens_per_second"], 1)
            for row in done
            if "tokens_per_second" in row["result"]
        },
        "tiny": args.tiny,
        "git_revision": done[0]["git_revision"],
        "page": str(args.out / "page.md"),
    }


def main() -> None:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="of this run")
    parser.add_argument("--out", type=Path, default=Path("runs/chip"))
    parser.add_argument(
        "--retry", action="store_true", help="measure failed parts again"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny models, to try the program"
    )
    parser.add_argument(
        "--least", type=float, default=60, help="seconds without which no part starts"
    )
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return process.measure(args.part)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out={args.out} cannot be used ({error.strerror})")
    began = time.monotonic()
    found = measure_all(args, began + 60 * args.minutes)
    seconds = round(time.monotonic() - began)
    text = page.page(found, sys.argv[1:], seconds)
    (args.out / "page.md").write_text(text, "utf-8")
    print(json.dumps(summary(found, args) | {"seconds": seconds}))


if __name__ == "__main__":
    main()
