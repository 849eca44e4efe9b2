"""The committed lines of the benchmarks, as tables."""

import json
import re
from typing import Any

from generate.markdown import ROOT, code, table

FOLDER = ROOT / "experiments/benchmarks"


def lines() -> list[dict[str, Any]]:
    """Returns the measured lines, in the order of the file."""
    text = (FOLDER / "results.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def number(value: float) -> str:
    """Returns a rate with as many digits as it deserves."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def row(line: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """Returns the row of one case: both sides, and their ratio."""
    sides = case["sides"]
    names = [name for name in sides if name != "bound"]
    cells = []
    for name in (names + [""])[:2]:
        side = sides.get(name, {})
        if "tokens_per_second" in side:
            spread = (
                f" (spread {100 * side['spread']:.0f} %)" if "spread" in side else ""
            )
            cells.append(f"{name}: {number(side['tokens_per_second'])}{spread}")
        else:
            cells.append("")
    ratio = f"{case['ratio']:.2f}" if "ratio" in case else ""
    if "of_the_bound" in case:
        ratio += f"; {100 * case['of_the_bound']:.0f} % of the bound"
    state = f"loaded: {line['trouble']}" if line.get("loaded") else "quiet"
    return [line["benchmark"], case["case"], *cells, ratio, state]


def measured() -> str:
    """Returns every measured line, by benchmark."""
    head = ("benchmark", "case", "tokens/s", "tokens/s", "ratio", "the machine was")
    rows = [row(line, case) for line in lines() for case in line.get("cases", [])]
    return table(head, rows)


def commands() -> str:
    """Returns the command, date and versions of every measured line."""
    rows = [
        (
            line["date"][:16].replace("T", " "),
            code(line["command"]),
            f"{line['device_kind']}, {line['cpu_count']} cores",
            ", ".join(
                f"{name} {line['versions'][name]}"
                for name in ("jax", "torch", "transformers")
                if name in line["versions"]
            ),
            code(line["git_revision"][:7]),
        )
        for line in lines()
    ]
    return table(("date (UTC)", "command", "device", "versions", "revision"), rows)


def page(name: str) -> str:
    """Returns a committed page of results, labelled, its headings one deeper."""
    text = (FOLDER / name).read_text("utf-8")
    label = "speed-" + name.partition(".")[0].replace("_", "-")
    return f"{{#{label}}}\n" + re.sub(r"^#", "##", text, flags=re.M)
