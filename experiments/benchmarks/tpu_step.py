"""The whole training step as the TPU compiler sees it, for one chip: tpu_step.md.

    pip install 'jax[tpu]'
    python -m experiments.benchmarks.tpu_step [--only=step|largest] [--rows=N]

libtpu compiles the step that `train` runs: forward, backward and the optimiser, with
one chip's share of the published batch, in bfloat16, with each attention kernel. Rows
go to tpu_step.jsonl, and the page is made of them. What is there is not compiled again;
--rows=N makes N more at most, and --rows=0 writes the page alone.

    step      memory, traffic and cycles, as the compiler states them, and the static
              schedule of the Pallas kernels, read as `tpu_estimate` reads it
    largest   the most streams that fit

No TPU takes part: all cycles are estimates.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.benchmarks import tpu_estimate
from txl_jax import aot, chips, pod, roofline
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.hlo import Program
from txl_jax.kernels import softmax, tiles, tpu_blocks

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "tpu_step.jsonl", FOLDER / "tpu_step.md"
CHIPS = ("v5e", "v5p")
KERNELS = ("xla", "chunked", "tpu")
# Streams of one chip: of the published 64 on 16 chips, and of 128 on 32.
STREAMS = {"enwik8_24l": 4, "wt103_large": 4}
GOAL, GIB = 1.5, 2**30
NAME = "experiments.benchmarks.tpu_step"
Row = dict[str, Any]


def wanted() -> Iterator[Row]:
    """Yields every row's name: what is compiled, for which chip."""
    for part in ("step", "largest"):
        for chip, experiment, kernel in itertools.product(CHIPS, STREAMS, KERNELS):
            row = {"part": part, "experiment": experiment, "chip": chip}
            yield row | {"kernel": kernel}


# Measuring a row


def read(row: Row) -> Config:
    """Returns the experiment as the row has it compiled."""
    name = row["experiment"]
    config = aot.find_vocab(configs.parse(configs.load(name)))
    config = aot.replace(config, "model", dtype="bfloat16", kernel=row["kernel"])
    return aot.replace(config, "train", batch_size=STREAMS[name])


def attention_shape(config: Config) -> tuple[int, int, int, int, int]:
    """Returns B, H, A, L, M of one layer's attention."""
    model, train = config.model, config.train
    return train.batch_size, model.n_head, model.d_head, train.tgt_len, model.mem_len


def chunked_turns(config: Config) -> float:
    """Returns the tiles that a block of `chunked` sees behind its diagonal, on average.

    The memory is full and every query sees all of it, as in training.
    """
    B, H, _, L, M = attention_shape(config)
    X, Y = tiles.choose_blocks(B * H, L, M + L)
    plan = tiles.Plan(L, M, X, Y, config.model.dropatt)
    ends = (M + L - block * X for block in range(plan.Q))
    return sum(-(-end // Y) - 1 for end in ends) / plan.Q


def rare_turns(config: Config) -> int:
    """Returns the most blocks of tokens of a rare cluster, by `roofline.zipf`."""
    model, train = config.model, config.train
    T = train.batch_size * train.tgt_len
    block = softmax.ACCELERATOR.rare
    X = min(T, block.scores // block.rows)
    parts = roofline.zipf(model.vocab_size, model.cutoffs)[1:]
    return max((math.ceil(T * part / X) for part in parts), default=1)


def vmem(dump: str) -> tuple[int, int]:
    """Returns the bytes of VMEM that a dumped program takes, and that there are.

    XLA's arrays in it, at their most, and the most that an operation works in.
    """
    (path,) = Path(dump).glob("*vmem_report.html")
    text = path.read_text("utf-8")
    report, _ = json.JSONDecoder().raw_decode(text, text.index("DATA =") + 6)
    taken = report["hlo_breakdowns"]["<top-inlining-caller>"]["total_size"]
    return taken, report["global_info"]["vmem_capacity"]


def measure_step(row: Row, dump: str) -> Row:
    """Returns what the compiler says of the row's training step, of one update."""
    config, part = read(row), chips.find(tpu_estimate.CHIPS[row["chip"]][0])
    devices = chips.find_devices(part)[:1]
    done = aot.compile_train(config, devices)
    row |= {
        "streams": config.train.batch_size,
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(part.chip.hbm),
        "seconds_to_compile": round(done.seconds, 1),
    }
    if not done.fits:
        return row
    assumed = {
        "/attention/": chunked_turns(config),
        "/embedding.nll/": rare_turns(config),
    }
    program, calls = Program(done.text, assumed), config.train.updates_per_call
    cycles = pod.by_scope(program.cycles())
    taken, capacity = vmem(dump)
    row |= {
        "assumed_turns": assumed,
        "vmem_bytes": taken,
        "vmem_capacity_bytes": capacity,
        "hbm_traffic_bytes": int(sum(program.hbm_bytes().values()) / calls),
        "xla_cycles": int(sum(cycles.values()) / calls),
        "xla_cycles_by_scope": {k: int(each / calls) for k, each in cycles.items()},
        "kernel_cycles": 0,
    }
    if pallas := program.pallas_calls():
        # Forward and backward, each as often as there are layers.
        (times,) = set(pallas.values())
        B, H, A, L, M = attention_shape(config)
        blocks = tpu_blocks.choose(devices[0].device_kind, L, M + L, A)
        layer = tpu_estimate.scheduled(dump, blocks, B * H, row["chip"])
        row["kernel_cycles"] = int(times / calls * layer)
    return row


def measure_largest(row: Row, _: str) -> Row:
    """Returns the most streams that fit on one chip."""
    part = chips.find(tpu_estimate.CHIPS[row["chip"]][0])
    devices = chips.find_devices(part)[:1]
    one = dataclasses.replace(part, shape=(1,))
    try:
        config = pod.largest_batch(read(row), devices, one)
    except UserError:
        return row | {"streams": 0}
    return row | {"streams": config.train.batch_size}


MEASURES = {"step": measure_step, "largest": measure_largest}


def dump_flags(row: Row, dump: str) -> str:
    """Returns libtpu's flags to write down what the row's measure reads."""
    if row["part"] != "step":
        return ""
    # The report of VMEM comes with any of them.
    label = "final_bundles" if row["kernel"] == "tpu" else "none"
    return (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={label}"
    )


def run(row: Row) -> Row | None:
    """Measures a row in a process of its own, where libtpu reads its flags once.

    None where that fails; why is on stderr.
    """
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | tpu_estimate.ENVIRONMENT
        environment["LIBTPU_INIT_ARGS"] = dump_flags(row, dump)
        command = [sys.executable, "-m", NAME, "--row", json.dumps([row, dump])]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
    if done.returncode:
        return None
    said = {"libtpu": version("libtpu"), "date": date.today().isoformat()}
    return json.loads(done.stdout.splitlines()[-1]) | said


def known() -> list[Row]:
    """Returns the rows so far."""
    if not LINES.exists():
        return []
    return [json.loads(line) for line in LINES.read_text("utf-8").splitlines()]


# The page


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

Found by compiling with more and more streams of the same segments.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *MEASURES])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        row, dump = json.loads(given.row)
        print(json.dumps(MEASURES[row["part"]](row, dump)))
        return
    left = given.rows
    for row in wanted():
        if find(known(), **row) or given.only not in ("", row["part"]) or not left:
            continue
        left -= 1
        if made := run(row):
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")
        print(json.dumps(made or row | {"failed": True}), flush=True)
    PAGE.write_text(page(known()), "utf-8")


if __name__ == "__main__":
    main()
