"""Compiles the published models for TPU slices; writes pods.jsonl and pods.md.

    pip install 'jax[tpu]'
    python -m experiments.benchmarks.pods [--only=TABLE] [--rows=N]

Each row is one command of `--mode=compile`, whose JSON, with the collectives of the
compiled step, becomes a line of pods.jsonl.
Existing rows are not compiled again. --rows=N compiles at most N rows; --rows=0 only
writes pods.md. No TPU is used.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

import jax

from experiments.benchmarks import record
from experiments.benchmarks.hlo import HloProgram, collectives
from experiments.benchmarks.record import Row
from experiments.figures import program
from txl_jax.cli import compile_ahead, flags

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "pods.jsonl", FOLDER / "pods.md"
TITLES = {
    "fit": "The large models on large slices",
    "published": "The published batch on more and more chips",
    "weak": "8,192 tokens per chip",
    "pieces": "Four segments of the text on four chips each (revision 33c384c4)",
}
# Slices by their number of chips, for v4 and v5p, and for v5e and v6e.
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
CUBES |= {128: "4x4x8", 256: "4x8x8"}
FLAT = {8: "2x4", 16: "4x4", 32: "4x8", 128: "8x16", 256: "16x16"}
# The paper used 32, 32, 64 and 512 TPU cores; a chip of v4 has two.
PUBLISHED = {
    **{"wt103_large": (32, 8, 128, 256), "enwik8_24l": (16, 64, 256)},
    **{"lm1b_large": (256, 64), "wt103": (4,), "enwik8": (4,)},
    **{"wt103_nvidia": (8, 128), "wt103_nvidia_large": (8,), "text8": (16,)},
    **{"enwik8_18l": (16,), "lm1b": (32,), "ptb": (4,)},
}


def row(table: str, name: str, chip: str, chips: int, flags: str) -> Row:
    """Returns the table, the experiment and the command of a row."""
    shape = (CUBES if chip in ("v4", "v5p") else FLAT)[chips]
    command = f"--mode=compile --topology={chip}:{shape} --config={name} {flags}"
    return {"table": table, "experiment": name, "flags": command}


def wanted() -> Iterator[Row]:
    """Yields every row, by priority."""
    for kernel in ("xla", "tpu"):
        flag = f"--config.model.kernel={kernel}"
        auto = f"{flag} --mesh=auto --config.eval.streams=128"
        fsdp = f"{flag} --config.mesh.fsdp=8 --config.eval.streams=256"
        yield row("fit", "wt103_large", "v4", 128, f"{flag} --config.eval.streams=128")
        yield row("fit", "wt103_large", "v5e", 256, auto)
        yield row("fit", "lm1b_large", "v5e", 256, fsdp)
    flags = "--mesh=auto --config.model.kernel=tpu --config.model.dtype=bfloat16"
    for name, sizes in PUBLISHED.items():
        for chips in sizes:
            yield row("published", name, "v4", chips, flags)
    # 21 segments of 384 tokens are 8,064, 256 of 32 are 8,192.
    for name, streams in (("wt103_large", 21), ("lm1b_large", 256)):
        for chips in (8, 256, 32):
            many = f"{flags} --config.train.batch_size={streams * chips}"
            for kind in ("v5e", "v4", "v5p", "v6e"):
                yield row("weak", name, kind, chips, many)
    for chips in (8, 256, 32):  # without remat, this model does not fit on v5e
        many = f"{flags} --config.train.batch_size={256 * chips}"
        remat = f"{many} --config.model.remat_policy=full"
        yield row("weak", "lm1b_large", "v5e", chips, remat)


def measure(row: Row) -> Row:
    """Runs one row's command, and returns its JSON or its error message."""
    row |= {"date": date.today().isoformat(), "libtpu": version("libtpu")}
    program = [sys.executable, "-m", "experiments.benchmarks.pods"]
    program.append(f"--compile={row['flags']}")
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def compile_row(command: str) -> Row:
    """Compiles the steps of a command; returns its JSON and an update's collectives."""
    config = flags.parse(command.split()).config
    result, steps = compile_ahead.compile_steps(config)
    if program := steps["training"].program:
        updates = config.train.updates_of_call(config.checkpoint.every_steps)
        result["collectives"] = exchanges(program, updates)
    return result


def exchanges(program: jax.stages.Compiled, updates: int = 1) -> Row:
    """Returns the count and the bytes of each kind of collective in an update."""
    totals: dict[str, dict[str, float]] = {}
    for kind, size, times in collectives(HloProgram(program.as_text() or "")):
        total = totals.setdefault(kind, {"count": 0, "bytes": 0})
        total["count"] += times / updates
        total["bytes"] += times * size / updates
    return {
        kind: {name: round(amount) for name, amount in total.items()}
        for kind, total in totals.items()
    }


HEAD = (
    *("experiment", "slice", "chips", "mesh", "kernel", "streams", "GiB of"),
    *("GFLOPs a token", "TFLOPs a chip", "collectives of an update", "compiled, s"),
)


def cells(row: Row) -> list[str]:
    """Returns the cells of a row; one without a date is marked as older."""
    name = f"`{row['experiment']}`" + ("" if "date" in row else " †")
    if "error" in row:
        topology = row["flags"].partition("--topology=")[2].split()[0]
        return [name, topology, row["error"]]
    mesh = " x ".join(str(size) for size in row["mesh"].values())
    gib = f"{row['hbm_bytes'] / 2**30:.1f} of {row['hbm_capacity_bytes'] / 2**30:.1f}"
    kept = row.get("remat_policy", "full" if row.get("remat") else "none")
    remat = "" if kept == "none" else f", remat {kept}"
    flops = row["flops_per_token"] * row.get("tokens", 0) / row["chips"]
    return [
        *(name, row["topology"], str(row["chips"]), mesh),
        f"{row['kernel']}, {row['dtype']}{remat}",
        *(str(row["batch_size"]), gib + ("" if row["fits"] else ", does not fit")),
        f"{row['flops_per_token'] / 1e9:.2f}",
        f"{flops / 1e12:.2f}" if flops else "",
        ", ".join(
            f"{each['count']} {kind} of {each['bytes'] / 1e6:,.0f} MB"
            for kind, each in row.get("collectives", {}).items()
        ),
        f"{row['seconds_to_compile']:.0f}",
    ]


def page(rows: list[Row]) -> str:
    """Returns the Markdown of all tables."""
    lines = [INTRODUCTION]
    for table, title in TITLES.items():
        of_table = [row for row in rows if row["table"] == table]
        of_table.sort(key=lambda row: (row["experiment"], row.get("chips", 0)))
        lines += [f"## {title}", "", *record.table(HEAD, map(cells, of_table)), ""]
    return "\n".join(lines)


INTRODUCTION = """\
# The published models on TPU slices

Nothing on this page was measured. libtpu compiled each training step for the slice on a
machine without a TPU; memory and collectives are read from the compiled programs.
`python -m experiments.benchmarks.pods` writes this page; the full results, with each
command, are in `pods.jsonl`. Results up to 23 November 2026 also have bounds on the
time of a step, which revision 5e7cffb computed.

Columns: mesh is data x fsdp x model (x segments); streams counts all chips; GiB is the
memory of one device; FLOPs are the matrix products that the mathematics needs, for one
token and for a chip's share of an update; the bytes of collectives are the sizes of
whole arrays, for collective-permute of each device's part; compiled is the time on two
cores that also ran other work and, for some rows, were suspended for minutes.

All rows were made with libtpu 0.0.42.*, which jax[tpu] 0.10.2 installs. Its memory
figures exceed 0.0.51's: for a small step, 125 instead of 74 MB of temporaries and a
peak of 213 instead of 204 MB. Both versions reject a step that does not fit. So a step
that 0.0.42 accepted while stating more memory than the chip has just fits, and the
stated figure is too large.

Rows marked † are from an earlier version of the step. Seven of them, `lm1b_large`
without remat on 32 and 256 chips, except v5e:16x16, are older still: the last dimension
of W_q, W_k, W_v and W_r was the head size instead of D. Marked rows of the second and
third tables have no evaluation step in `pods.jsonl`, because their commands left it
out. Rows of v4 with `tpu` were made when that kernel still supported v4; `auto` now
selects `xla` or `chunked` for it.

Rows of the last table can no longer be made: revision 33c384c4 has the code that splits
a text over devices (`mesh.segments`). Each layer passes the newest M states of a piece
to the next chip: in the forward pass, back in the backward pass, and once more, as
bfloat16, where the backward pass computes the layer's input again. The all-reduces sum
the gradients and, once in an update, the memory, which only the last piece's chip has.
"""


def fill(args: argparse.Namespace) -> None:
    """Measures the rows that are missing, or compiles one."""
    if args.compile:
        print(json.dumps(compile_row(args.compile)))
        return
    rows = record.read_rows(LINES)
    missing = [
        row
        for row in wanted()
        if args.only in ("", row["table"])
        and not any(row.items() <= each.items() for each in rows)
    ]
    for row in missing[: args.rows]:
        rows.append(measure(row))
        record.append(LINES, rows[-1])
        print(json.dumps(rows[-1])[:300], flush=True)
    PAGE.write_text(page(rows), "utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--only", default="", choices=["", *TITLES])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    return program.run(parser, fill, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
