"""Writes tpu_step.md from the rows of tpu_step.jsonl; see `tpu_step`."""

import itertools
from collections import Counter
from collections.abc import Iterable

from experiments.benchmarks.tpu_operations import PEAK
from experiments.benchmarks.tpu_step_rows import (
    BATCH,
    CHIPS,
    KERNELS,
    STREAMS,
    Row,
    find,
    wanted,
)

GOAL, UTILISATION, GIB = 1.5, 0.42, 2**30


def total(row: Row) -> int:
    """Returns the cycles of a step, including its Pallas kernels."""
    return row["xla_cycles"] + row["kernel_cycles"]


def millions(cycles: float) -> str:
    """Formats cycles in millions."""
    return f"{cycles / 1e6:,.1f}"


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table; `head` is comma-separated."""
    names = head.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join([*x, *[''] * (len(names) - len(x))])} |" for x in lines]


def step_cells(name: Row, rows: list[Row]) -> list[str]:
    """Returns the row of the first table for one compiled step."""
    first = [f"`{name['experiment']}`", name["chip"], name["kernel"]]
    row = find(rows, **name)
    if row is None:
        return [*first, "not run"]
    capacity = row["hbm_capacity_bytes"] / GIB
    if not row["fits"]:
        need = row["hbm_bytes"] / GIB
        return [*first, f"out of memory, needs {need:.1f} GiB of {capacity:.1f}"]
    other = find(rows, **{**name, "kernel": "xla"})
    ratio = "" if other is None else "`xla` does not fit"
    if other and other["fits"]:
        ratio = f"{total(other) / total(row):.2f}"
    return [
        *first,
        f"{row['hbm_bytes'] / GIB:.1f} of {capacity:.1f}",
        f"{row['vmem_bytes'] / 2**20:.0f} of {row['vmem_capacity_bytes'] / 2**20:.0f}",
        f"{row['hbm_traffic_bytes'] / 1e9:.1f}",
        millions(row["xla_cycles"]),
        millions(row["kernel_cycles"]),
        millions(total(row)),
        ratio,
    ]


SCOPES = {
    "attention": "attention",
    "feed_forward": "feed-forward",
    "layers": "between layers",
    "embedding.embed": "embedding",
    "embedding.nll": "softmax",
    "memory": "memory",
    "update": "update",
    "unnamed": "unnamed",
}


def scope_cells(name: Row, rows: list[Row]) -> list[str]:
    """Returns the row of the second table: a step's cycles by scope."""
    row = find(rows, **name)
    first = [f"`{name['experiment']}`", name["chip"], name["kernel"]]
    if row is None or not row["fits"]:
        return first
    cycles = Counter[str](row["xla_cycles_by_scope"])
    cycles["attention"] += row["kernel_cycles"]
    return first + [millions(cycles[scope]) for scope in SCOPES]


def verdict(rows: list[Row]) -> str:
    """States for each model and chip whether `tpu` reaches GOAL against `xla`."""
    parts = []
    for experiment, chip in itertools.product(STREAMS, CHIPS):
        name = {"part": "step", "experiment": experiment, "chip": chip}
        pair = [find(rows, **name, kernel=kernel) for kernel in ("xla", "tpu")]
        if all(row and row["fits"] for row in pair):
            ratio = total(pair[0]) / total(pair[1])  # type: ignore[arg-type]
            met = "met" if ratio >= GOAL else "missed"
            parts.append(f"`{experiment}` on {chip} {ratio:.2f} ({met})")
    return (
        f"Cycles of `xla` divided by cycles of `tpu`, with a goal of {GOAL}: "
        f"{', '.join(parts)}."
    )


def batch_cells(row: Row, rows: list[Row]) -> list[str]:
    """Returns the row of the table of best batches for one compiled step."""
    first = [f"`{row['experiment']}`", row["chip"], str(row["streams"])]
    first.append(version(row))
    if not row["fits"]:
        return [*first, f"out of memory, needs {row['hbm_bytes'] / GIB:.1f}"]
    return [
        *first,
        f"{row['hbm_bytes'] / GIB:.1f}",
        f"{row['hbm_traffic_bytes'] / 1e9:.1f}",
        millions(row["xla_cycles"]),
        millions(kernel_cycles(row, rows)),
        millions(row["xla_cycles"] + kernel_cycles(row, rows)),
        f"{utilisation(row, rows):.1%}",
        f"{row['seconds_to_compile']:.0f}",
    ]


def version(row: Row) -> str:
    """Returns what a row of the part `batch` or `before` compiled."""
    if row["part"] == "before":
        return "before"
    return "now, unrolled" if row["unroll"] > 1 else "now"


def kernel_cycles(row: Row, rows: list[Row]) -> float:
    """Returns the schedule of a step's kernels, in proportion to its streams.

    Each stream takes as many cycles as in the row of the part `step`.
    """
    names = {name: row[name] for name in ("experiment", "chip", "kernel")}
    one = find(rows, part="step", **names) or {}
    return one["kernel_cycles"] * row["streams"] / one["streams"]


def utilisation(row: Row, rows: list[Row]) -> float:
    """Returns model FLOPs by the FLOPs of the chip's peak in the estimated cycles."""
    cycles = row["xla_cycles"] + kernel_cycles(row, rows)
    return row["model_flops"] / PEAK[row["chip"]] / cycles


def goal(rows: list[Row]) -> str:
    """States for each model and chip whether a step reaches UTILISATION."""
    parts = []
    for experiment, chip in BATCH:
        names = {"part": "batch", "experiment": experiment, "chip": chip}
        fit = [row for row in rows if names.items() <= row.items() and row["fits"]]
        if fit:
            best = max(fit, key=lambda row: utilisation(row, rows))
            share = utilisation(best, rows)
            met = "met" if share >= UTILISATION else "missed"
            kind = " unrolled" if best["unroll"] > 1 else ""
            parts.append(f"`{experiment}` on {chip} {share:.1%}{kind} ({met})")
    return f"With a goal of {UTILISATION:.0%}: {'; '.join(parts)}."


def page(rows: list[Row]) -> str:
    """Returns the Markdown of all tables."""
    batches = [row for row in rows if row["part"] in ("before", "batch")]
    batches.sort(key=lambda r: (r["chip"], r["experiment"], r.get("unroll", 0)))
    operations = [
        [row["operation"], millions(row["least_cycles"]), millions(row["xla_cycles"])]
        + [f"{row['xla_cycles'] / row['least_cycles']:.2f}"]
        for row in rows
        if row["part"] == "operation"
    ]
    origin = [
        " and ".join(sorted({row[name] for row in rows})) for name in ("libtpu", "date")
    ]
    steps = [name for name in wanted() if name["part"] == "step"]
    most = []
    for chip, experiment in itertools.product(CHIPS, STREAMS):
        name = {"part": "largest", "experiment": experiment, "chip": chip}
        measured = [find(rows, **name, kernel=kernel) for kernel in KERNELS]
        cells = ["not run" if row is None else str(row["streams"]) for row in measured]
        most.append([f"`{experiment}`", chip, *cells])
    lines = [
        INTRODUCTION.format(*origin),
        *table(STEP_HEAD, (step_cells(name, rows) for name in steps)),
        "",
        verdict(rows),
        "",
        WHERE,
        *table(
            f"experiment, chip, kernel, {', '.join(SCOPES.values())}",
            (scope_cells(name, rows) for name in steps),
        ),
        "",
        MOST,
        *table(f"experiment, chip, {', '.join(KERNELS)}", most),
        "",
        BEST,
        *table(BEST_HEAD, (batch_cells(row, rows) for row in batches)),
        *("", goal(rows), "", TRUST),
        *table("operation, least M, estimated M, estimated / least", operations),
    ]
    return "\n".join(lines) + "\n"


STEP_HEAD = (
    "experiment, chip, kernel, HBM GiB, VMEM MiB, HBM traffic GB, XLA's cycles M, "
    "kernels' schedule M, total M, xla / this"
)
INTRODUCTION = """\
# The training step on one chip, as the TPU compiler estimates it

Nothing on this page was measured. libtpu ({}) compiled the step that
`train` runs (forward, backward and optimizer, all layers, in bfloat16) for one chip on
a machine without a TPU. The batch is one chip's share of the published one: 4 segments
of 768 tokens of `enwik8_24l` (64 streams over 16 chips) and 4 of 384 of `wt103_large`
(128 over 32). Communication between chips is excluded. The rows were made on
{} by

    python -m experiments.benchmarks.tpu_step

All figures are for one update, and all cycles are estimates. Steps keep all activations
(`remat_policy = "none"`) but for those with a large batch. The numbers of the most
streams are of 2026-11-22 and older than the changes listed below.

- HBM: parameters, moments, temporaries and the program, of the memory that the compiler
  lets a chip use. For a step that does not fit, the memory that it needs.
- VMEM: the peak use of the memory inside the chip, from the compiler's report: XLA's
  arrays and the scratch memory of one operation or kernel.
- HBM traffic: bytes read and written, counted in the compiled program; each operand of
  a Pallas kernel counts once.
- XLA's cycles: the sum of the compiler's `estimated_cycles`, multiplied by the trip
  counts of loops. Pallas kernels, asynchronous copies and scalar arithmetic have no
  estimate.
- kernels' schedule: instruction bundles of the tiles that the Pallas kernels visit, one
  per cycle, times heads, streams and layers, read from the same program. Waits for
  memory and the overhead of grid steps are excluded. Halved on v5p, which has two
  cores.

The length of some loops depends on the data. The memory is assumed to be full and
visible to every query, which determines the number of tiles that `chunked` visits; the
TPU kernels skip no tile in this case. By Zipf's law the tokens of a rare cluster of the
vocabulary fill 1 block on average with 4 streams of `wt103_large`, 4.7 with 32 and 17.7
with 128.

The same command adds missing rows. For v5p use libtpu 0.0.42.*, which jax 0.10.2
requires: that jax cannot read the program that 0.0.51 makes of `wt103_large` for v5p
("async-update instruction should have 1 operands but sees 3").
"""
BEST_HEAD = (
    "experiment, chip, streams, revision, HBM GiB, HBM traffic GB, XLA's cycles M, "
    "kernels' schedule M, total M, estimated utilization, compiled in s"
)
BEST = """\
## The step with a large batch, before and after

The kernel is `tpu`. Utilization is the model's FLOPs (those of `roofline.needed_flops`,
which counts masked scores) by what the chip's matrix units could do in the estimated
cycles. Before is revision bbf5286; since then

- the layers' matrices are cast to bfloat16 once before the scan over layers, and the
  gradients of an update with a single part stay in bfloat16 until the optimizer;
- the recipes keep named arrays only (`remat_policy = "save:q,k,v,r,o,hidden,sum"`): the
  kernel's operands and results, the ReLU's result and the inputs of norms;
- the end of a full segment replaces a memory that is not longer: they are no longer
  concatenated and cut, and an empty memory is only written where an update is skipped;
- norms keep their sums over features for the backward pass.

Unrolled: `--config.model.unroll=N` for N layers removes the scan over layers.
Activations for the backward pass are then no longer copied into and out of arrays of
all layers. In exchange, the step needs a fifth to a third more memory, and compiling
takes three to seven times as long (on two cores that also did other work).

Branches that are not the usual ones do not count: a document that starts with the
segment, a stream that is not full, a skipped update.
"""
TRUST = """\
## How far to trust the estimate

Lone operations on v5e, against the cycles that their FLOPs or bytes take at the chip's
peak rates. Products are estimated close to that, operations bound by memory far above
it, and the kernels' schedule leaves out waits. So compare the HBM traffic as well,
which is counted in the program.
"""
WHERE = """\
## Where the cycles are

In millions, the kernels' schedule and XLA's cycles together. Between layers:
activations passed to the next layer or kept for the backward pass. Update: gradient
norm, optimizer and guard.
"""
MOST = """\
## The most streams on one chip

Found by compiling with different numbers of streams of the same segments. For a step
that it accepts, libtpu 0.0.42 may state up to 10 % more memory than the chip has.
"""
