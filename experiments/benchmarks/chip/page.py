"""The Markdown page of a first contact, ready to be sent."""

import shlex
from typing import Any

from experiments.benchmarks import record
from experiments.benchmarks.chip import plan, rows
from experiments.benchmarks.quiet import MOST_LOAD

Row = dict[str, Any]
GIB = 2**30


def table(head: str, lines: list[list[str]]) -> list[str]:
    """Returns a Markdown table, or a line that there is nothing; `head` has commas."""
    return record.table(head.split(", "), lines) if lines else ["Nothing was measured."]


def number(value: float, unit: str = "") -> str:
    """Returns a number with three digits, or more where it is large."""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def worst(errors: dict[str, float | None]) -> str:
    """Returns the greatest error and its array; null stands for NaN."""
    if bad := [name for name, error in errors.items() if error is None]:
        return f"not finite ({bad[0]})"
    named = [(error or 0.0, name.split()[-1]) for name, error in errors.items()]
    return "{:.0e} ({})".format(*max(named)) if named else ""


def of(known: float) -> str:
    """Returns the known peak in T FLOP/s or GB/s, if there is one."""
    return f" (specified: {number(known)})" if known else ""


def machine_lines(row: Row) -> list[str]:
    """Returns what the machine is."""
    facts = row["result"]
    peaks = {name: facts.get(f"{name}_flops", 0.0) for name in ("bfloat16", "float32")}
    versions = ", ".join(f"{name} {x}" for name, x in facts["versions"].items())
    lines = [
        f"- {facts['count']} x {facts['device_kind']}, "
        f"{facts['memory_bytes'] / GIB:.1f} GiB each",
        f"- products in bfloat16: {number(peaks['bfloat16'] / 1e12)} T FLOP/s"
        + of(facts["known_flops"] / 1e12),
        f"- products in float32: {number(peaks['float32'] / 1e12)} T FLOP/s",
        f"- reading and writing: {number(facts.get('bandwidth', 0) / 1e9)} GB/s"
        + of(facts["known_bandwidth"] / 1e9),
        f"- {versions}; revision {row['git_revision']}",
    ]
    if facts["platform"] == "cpu":
        lines[0] = f"- {facts['processor']}, {facts['memory_bytes'] / GIB:.1f} GiB"
    return lines


def check_lines(found: list[Row]) -> list[str]:
    """Returns the greatest error of each kernel at each shape."""
    lines = []
    for row in found:
        if row["part"] != "check" or "result" not in row:
            continue
        errors = row["result"].get("errors", {})
        terms = plan.TERMS[row["terms"]]
        cells = [f"`{row['kernel']}`", plan.shape_name(row["shape"]), terms]
        for name in ("float32", "default", "bfloat16"):
            cells.append(worst(errors.get(name, {})))
        verdict = "**wrong**" if rows.is_fault(row) else row["error"] or "agrees"
        lines.append([*cells, verdict])
    columns = "kernel, shape, terms, float32, float32 by default, bfloat16, verdict"
    return table(columns, lines)


def train_lines(found: list[Row]) -> list[str]:
    """Returns the speed and memory of training steps."""
    lines = []
    for row in found:
        if row["part"] not in ("train", "most") or "result" not in row:
            continue
        result, most = row["result"], row["part"] == "most"
        more = ", most streams" if most else f", `{row['kernel']}`"
        cells = [f"`{row['experiment']}`{more}"]
        if "tokens_per_second" not in result:
            lines.append([*cells, str(result.get("streams", "")), row["error"]])
            continue
        lines.append(
            [
                *cells,
                f"{result['streams']} x {result['tgt_len']}",
                number(1e3 * result["update_seconds"], "ms"),
                number(result["tokens_per_second"]),
                f"{result['mfu']:.1%}",
                f"{result['bytes'] / GIB:.1f}",
                f"{result['peak_bytes'] / GIB:.1f}" if result["peak_bytes"] else "",
                "{:.2f} to {:.2f}".format(*result["loss"]),
            ]
        )
    head = "config, streams x tokens, update, tokens/s, MFU, GiB by the compiler, "
    return table(f"{head}GiB at most, loss in nats", lines)


def reading_lines(found: list[Row]) -> list[str]:
    """Returns the speed of evaluation and generation."""
    lines = []
    for row in found:
        if row["part"] not in ("evaluate", "generate") or "result" not in row:
            continue
        result = row["result"]
        share = f"{result['mfu']:.1%} MFU" if "mfu" in result else ""
        if "of_the_bound" in result:
            share = f"{result['of_the_bound']:.0%} of the memory bound"
        rate = number(result.get("tokens_per_second", 0))
        lines.append(
            [
                f"`{row['experiment']}`",
                row["part"],
                str(result.get("streams", 1)),
                str(result.get("mem_len", "")),
                row["error"] if rate == "0" else rate,
                share,
            ]
        )
    return table("config, task, streams, memory, tokens/s, share", lines)


def torch_lines(found: list[Row], reason: str) -> list[str]:
    """Returns the port's speed beside ours."""
    if reason.startswith("not "):
        return [f"PyTorch: {reason}."]
    ours: dict[tuple[str, str], float] = {}
    for row in found:
        if row["part"] in plan.TASKS and "result" in row:
            name = row["experiment"], row["part"]
            rate = row["result"].get("tokens_per_second", 0.0)
            ours[name] = max(rate, ours.get(name, 0.0))
    lines = []
    for row in found:
        if row["part"] != "torch" or "result" not in row:
            continue
        rate = row["result"].get("tokens_per_second", 0.0)
        own = ours.get((row["experiment"], row["task"]), 0.0)
        cells = [f"`{row['experiment']}`", row["task"], row["mode"]]
        cells += [row["error"] if not rate else number(rate), number(own)]
        lines.append([*cells, f"{own / rate:.2f}" if rate and own else ""])
    head = "config, task, PyTorch, its tokens/s, ours, ratio"
    about = (
        f"The port of Hugging Face, on {reason}. Its segments have `train.tgt_len` "
        "tokens. Where the recipe varies that length (`ptb`), this project pads every "
        "segment to the longest and counts only real tokens."
    )
    return [about, "", *table(head, lines)]


def page(found: list[Row], flags: list[str], seconds: float) -> str:
    """Returns the page of the rows of all parts."""
    first, done = found[0], [row for row in found if "left" not in row]
    facts = first["result"]
    command = shlex.join(["python", "-m", "experiments.benchmarks.chip", *flags])
    dtype = "float32" if facts["platform"] == "cpu" else "bfloat16"
    busy = max(row["load_average"] for row in done) if facts["platform"] == "cpu" else 0
    notes = [f"Measured on {first['date'][:10]} in {seconds:.0f} s by `{command}`."]
    if first["load_average"] > MOST_LOAD:
        notes.append(
            f"**The machine was loaded** (load average {first['load_average']} at the "
            f"start, up to {busy}): times are rough."
        )
    if any(row.get("tiny") for row in found):
        notes.append("Tiny models, to try the program: no figure means anything.")
    left = [plan.title(row) for row in found if "left" in row]
    failed = [f"{plan.title(row)}: {row['error']}" for row in done if row["error"]]
    wrong = [
        f"`{row['kernel']}`: {row['result']['fault']}"
        for row in done
        if rows.is_fault(row)
    ]
    sections = {
        "Machine": machine_lines(first),
        "Attention kernels": [CHECKS, "", *check_lines(found), "", *bullets(wrong)],
        f"Training in {dtype}": [TRAINING, "", *train_lines(found)],
        "Evaluation and generation": [READING, "", *reading_lines(found)],
        "PyTorch": torch_lines(found, facts["torch"]),
        "Failed": bullets(failed) or ["Nothing."],
        "Not reached": bullets(left) or ["Nothing."],
    }
    lines = [f"# {facts['count']} x {facts['device_kind']}", "", " ".join(notes)]
    for name, body in sections.items():
        lines += ["", f"## {name}", "", "\n".join(body).strip()]
    return "\n".join(lines) + "\n"


def bullets(texts: list[str]) -> list[str]:
    """Returns a list in Markdown."""
    return [f"- {text}" for text in texts]


CHECKS = """\
The greatest error of the values and of all gradients, by the greatest number of the
same array, against the einsum on the CPU in float32, with dropout 0.1. A shape is
streams x heads x queries + memory x head size. Terms are those of a score besides q k:
the paper's, or those of another position scheme. "float32" has exact products, "by
default" the device's own."""
TRAINING = """\
Updates as `train` makes them, on all devices, on random words by Zipf's law. MFU counts
no recomputation."""
READING = """\
One device, with the published lengths. The memory bound is the time of a product that
reads as many bytes as a token of generation."""
