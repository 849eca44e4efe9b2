"""The committed lines of the benchmarks, as tables."""

import json
import re
from typing import Any

from generate.markdown import ROOT, code, revision, table

FOLDER = ROOT / "experiments/benchmarks"
SIDES = {"ours": "txl_jax", "peer": "Hugging Face"}


def lines() -> list[dict[str, Any]]:
    """Returns the measured lines, in the order of the file."""
    text = (FOLDER / "results.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def number(value: float) -> str:
    """Returns a rate with its significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def row(line: dict[str, Any], case: dict[str, Any], sides: list[str]) -> list[str]:
    """Returns the row of one case: both sides, their ratio and the machine's state."""
    kernel = line.get("kernel", "auto")
    cells = [line["benchmark"], case["case"] + f", {kernel}" * (kernel != "auto")]
    for side in (case["sides"][name] for name in sides):
        cells += [
            number(side["tokens_per_second"]),
            f"{100 * side['spread']:.0f} %" if "spread" in side else "",
        ]
    share = case.get("of_the_bound")
    return [
        *cells,
        f"{case['ratio']:.2f}" if "ratio" in case else "",
        f"{100 * share:.0f} %" if share else "",
        f"loaded: {line['trouble']}" if line.get("loaded") else "quiet",
    ]


def measured() -> str:
    """Returns every measured line, a table for each pair of compared sides."""
    rows: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines():
        for case in line.get("cases", []):
            sides = [name for name in case["sides"] if name != "bound"]
            rows.setdefault(tuple(sides), []).append(row(line, case, sides))
    return "\n".join(
        table(
            (
                *("benchmark", "case"),
                *(
                    head
                    for name in sides
                    for head in (f"{SIDES.get(name, name)}, tokens/s", "spread")
                ),
                *("ratio", "share of the bound", "the machine was"),
            ),
            compared,
        )
        for sides, compared in rows.items()
    )


def gradients() -> str:
    """Returns memory and time against the segments that a gradient crosses."""
    found = {
        line["kernel"]: case["sides"]
        for line in lines()
        for case in line["cases"]
        if "across 1" in case["sides"]
    }
    kernels = {"chunked": "`chunked`", "auto": "`xla`"}  # auto means xla on a CPU
    rows = [
        (
            side.removeprefix("across "),
            *(
                cell
                for kernel in kernels
                for cell in (
                    f"{found[kernel][side]['temporary_bytes'] / 1e6:,.0f}",
                    f"{1e3 / found[kernel][side]['tokens_per_second']:.2f}",
                )
            ),
        )
        for side in found["auto"]
    ]
    heads = (f"{name}: {of}" for name in kernels.values() for of in ("MB", "ms"))
    return table(("c", *heads), rows)


def commands() -> str:
    """Returns the command, date and versions of every measured line."""
    rows = [
        (
            line["benchmark"],
            line["date"][:16].replace("T", " "),
            code(line["command"]),
            f"{line.get('processor', line['device_kind'])}, {line['cpu_count']} cores",
            ", ".join(
                f"{name} {line['versions'][name]}"
                for name in ("jax", "torch", "transformers")
                if name in line["versions"]
            ),
            revision(line["git_revision"]),
        )
        for line in lines()
    ]
    return table(
        ("benchmark", "date (UTC)", "command", "device", "versions", "revision"), rows
    )


def page(name: str) -> str:
    """Returns a committed page of results, labelled, its headings one deeper."""
    text = (FOLDER / name).read_text("utf-8")
    label = "speed-" + name.partition(".")[0].replace("_", "-")
    return f"{{#{label}}}\n" + re.sub(r"^#", "##", text, flags=re.M)
