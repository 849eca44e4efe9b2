"""The page of the rows that `tpu_step` makes: what they are, tables, and words.

Dims: none.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

CHIPS = ("v5e", "v5p")
KERNELS = ("xla", "chunked", "tpu")
# Streams of one chip: of the published 64 on 16 chips, and of 128 on 32.
STREAMS = {"enwik8_24l": 4, "wt103_large": 4}
GOAL, GIB = 1.5, 2**30
Row = dict[str, Any]


def wanted() -> Iterator[Row]:
    """Yields every row's name: what is compiled, for which chip."""
    for part in ("step", "largest"):
        for chip, experiment, kernel in itertools.product(CHIPS, STREAMS, KERNELS):
            row = {"part": part, "experiment": experiment, "chip": chip}
            yield row | {"kernel": kernel}


def find(rows: list[Row], **name: Any) -> Row | None:
    """Returns the row of that name, if there is one."""
    return next((row for row in rows if name.items() <= row.items()), None)


def total(row: Row) -> int:
    """Returns a step's cycles, XLA's and the kernels'."""
    return row["xla_cycles"] + row["kernel_cycles"]


def millions(cycles: float) -> str:
    """Returns cycles in millions, for people."""
    return f"{cycles / 1e6:,.1f}"


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table; the head's names have commas between."""
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
        wants = row["hbm_bytes"] / GIB
        return [*first, f"out of memory, wants {wants:.1f} GiB of {capacity:.1f}"]
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
    """Returns the row of the second table: where a step's cycles are."""
    row = find(rows, **name)
    first = [f"`{name['experiment']}`", name["chip"], name["kernel"]]
    if row is None or not row["fits"]:
        return first
    cycles = Counter[str](row["xla_cycles_by_scope"])
    cycles["attention"] += row["kernel_cycles"]
    return first + [millions(cycles[scope]) for scope in SCOPES]


def verdict(rows: list[Row]) -> str:
    """Returns where `tpu` takes GOAL times fewer cycles than `xla`, and where not."""
    parts = []
    for experiment, chip in itertools.product(STREAMS, CHIPS):
        name = {"part": "step", "experiment": experiment, "chip": chip}
        pair = [find(rows, **name, kernel=kernel) for kernel in ("xla", "tpu")]
        if all(row and row["fits"] for row in pair):
            ratio = total(pair[0]) / total(pair[1])  # type: ignore[arg-type]
            met = "met" if ratio >= GOAL else "missed"
            parts.append(f"`{experiment}` on {chip} {ratio:.2f} ({met})")
    return (
        f"Cycles of `xla` over those of `tpu`; the goal is {GOAL}: {', '.join(parts)}."
    )


def page(rows: list[Row]) -> str:
    """Returns the Markdown of all tables."""
    made = {chip: {r["libtpu"] for r in rows if r["chip"] == chip} for chip in CHIPS}
    said = [
        ", ".join(f"{' and '.join(sorted(x))} for {c}" for c, x in made.items() if x),
        " and ".join(sorted({row["date"] for row in rows})),
    ]
    steps = [name for name in wanted() if name["part"] == "step"]
    most = []
    for chip, experiment in itertools.product(CHIPS, STREAMS):
        name = {"part": "largest", "experiment": experiment, "chip": chip}
        found = [find(rows, **name, kernel=kernel) for kernel in KERNELS]
        cells = ["not run" if row is None else str(row["streams"]) for row in found]
        most.append([f"`{experiment}`", chip, *cells])
    lines = [
        INTRODUCTION.format(*said),
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
    ]
    return "\n".join(lines) + "\n"


STEP_HEAD = (
    "experiment, chip, kernel, HBM GiB, VMEM MiB, HBM traffic GB, XLA's cycles M, "
    "kernels' schedule M, total M, xla / this"
)
INTRODUCTION = """\
# The whole training step, as the TPU compiler estimates it

Nothing here was measured: no TPU took part. libtpu ({}) compiled the step that
`train` runs (forward, backward, optimiser; all layers, in bfloat16) for one chip, on a
machine without a TPU, with one chip's streams of the published batch: 4 segments of 768
tokens of `enwik8_24l` (64 streams over 16 chips), 4 of 384 of `wt103_large` (128 over
32), and without what chips say to each other. Made {} by

    python -m experiments.benchmarks.tpu_step

All figures are of one update; all cycles are estimates.

- HBM: parameters, moments, temporaries and the program, of what the compiler lets a
  chip use. Where it does not fit, what the compiler says that it wants.
- VMEM: the memory inside the chip, from the compiler's own report: XLA's arrays in it
  at their most, and the most that one operation or kernel works in.
- HBM traffic: bytes read and written, counted from the program's text; a Pallas kernel
  counts each of its operands once.
- XLA's cycles: the sum of the compiler's `estimated_cycles`, each as often as its loop
  runs. It states none for Pallas kernels, for copies that go on beside other work and
  for the arithmetic of single numbers.
- kernels' schedule: instruction bundles of the tiles that the Pallas kernels visit, one
  a cycle, times heads, streams and layers, read from this same program; a wait for
  memory and a grid step's start are not in it. On v5p halved, for two cores.

Some loops are as long as the data says. Assumed is a full memory, all of which every
query sees: so many tiles `chunked` visits. Of the vocabulary's clusters behind the
first, each has its part of the tokens by Zipf's law, fewer than one block's 256: one
block is counted. (The TPU kernels skip nothing then either.)

What is not run here the same command adds. For v5p give it the libtpu that jax 0.10.2
names, 0.0.42: what 0.0.51 makes of `wt103_large` for v5p this jax cannot read ("async-
update instruction should have 1 operands but sees 3").
"""
WHERE = """\
## Where the cycles are

In millions, kernels' schedule and XLA's together. Between layers: what goes from one to
the next and what the backward pass keeps. Update: gradients' norm, optimiser and guard.
"""
MOST = """\
## The most streams on one chip

Found by compiling with more and fewer streams of the same segments. What libtpu
0.0.42 takes it may state as up to 10 % more than the chip has.
"""
