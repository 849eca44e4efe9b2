"""Compiles the published models for NVIDIA GPUs; writes gpus.jsonl and gpus.md.

    pip install -e '.[gpu-aot]'
    python -m experiments.benchmarks.gpus [--rows=N] [--topology=h100:8]

Each row is one training step as `--mode=compile` compiles it; existing rows are not
compiled again. --rows=N compiles at most N rows; --rows=0 only writes gpus.md;
--topology takes the rows of these GPUs. No GPU is used.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks import record
from txl_jax import config as configs
from txl_jax.aot import chips
from txl_jax.cli import compile, steps
from txl_jax.errors import UserError

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "gpus.jsonl", FOLDER / "gpus.md"
SMALL = "enwik8 wt103 text8 ptb lm1b wt103_nvidia".split()
LARGE = "enwik8_24l wt103_large wt103_nvidia_large enwik8_18l lm1b_large".split()
KERNELS = ("xla", "chunked")
TOPOLOGIES = ("h100:1", "a100:1", "h100:8", "a100:8")
SHOWN = (
    *("topology", "kernel", "batch_size", "streams_per_chip", "fits", "hbm_bytes"),
    *("hbm_capacity_bytes", "seconds_to_compile", "collectives"),
)


class Row(NamedTuple):
    """What to compile: the published streams, or the most that fit."""

    topology: str
    experiment: str
    kernel: str
    most: bool = False


def rows() -> Iterator[Row]:
    """Yields all rows, by priority."""
    for count in (1, 8):
        for gpu in ("h100", "a100"):
            for name in (*SMALL, *LARGE):
                for kernel in KERNELS:
                    yield Row(f"{gpu}:{count}", name, kernel)
    for topology in TOPOLOGIES:
        for name in (*LARGE, *SMALL):
            for kernel in KERNELS:
                yield Row(topology, name, kernel, most=True)


def measure(row: Row, first: int) -> dict[str, Any]:
    """Returns the costs of a row's training step, or its error message.

    A search for the most streams first tries `first` on each GPU.
    """
    tree = configs.load(row.experiment)
    tree.model.update(kernel=row.kernel, dtype="bfloat16")
    tree.compile.update(topology=row.topology, streams_per_chip=-1 if row.most else 0)
    part = chips.find(row.topology)
    unit = part.chips * tree.train.batch_chunk
    tree.train.batch_size = -(-tree.train.batch_size // unit) * unit
    config = steps.find_vocab(configs.parse(tree))
    try:
        costs = compile.compile_one(config, chips.find_devices(part), part, first)[1]
    except UserError as error:
        return row._asdict() | {"error": str(error)}
    kept = {name: costs[name] for name in SHOWN if name in costs}
    both = costs.get("step_seconds", {})
    return row._asdict() | kept | {"step_seconds": both}


def read() -> dict[Row, dict[str, Any]]:
    """Returns the rows of gpus.jsonl."""
    rows = record.read(LINES)
    return {Row(*(row[name] for name in Row._fields)): row for row in rows}


def cell(row: dict[str, Any] | None) -> str:
    """Returns the memory of one device and whether it is enough, if it is known."""
    if row is None:
        return "not run"
    if "error" in row:
        return row["error"]
    fit = "" if row["fits"] else ", does not fit"
    return f"{row['hbm_bytes'] / 2**30:.1f}{fit}"


def exchanged(row: dict[str, Any] | None) -> str:
    """Returns the collectives of an update, if there are any."""
    kinds = (row or {}).get("collectives", {})
    parts = (
        f"{each['count']} {kind} of {each['bytes'] / 1e6:,.0f} MB"
        for kind, each in kinds.items()
    )
    return ", ".join(parts)


def page() -> str:
    """Returns the Markdown of all rows."""
    known = read()
    lines = [INTRODUCTION, ""]
    for most, title, head in (
        (False, "The published streams", (*HEAD, "collectives of `xla`")),
        (True, "The most streams that fit", HEAD),
    ):
        lines += [f"## {title}", "", f"| {' | '.join(head)} |"]
        lines.append("|---" * len(head) + "|")
        missing: dict[str, list[str]] = {}
        for first in rows():
            if first.kernel != "xla" or first.most != most:
                continue
            pair = [known.get(first._replace(kernel=kernel)) for kernel in KERNELS]
            if not any(pair):
                missing.setdefault(first.topology, []).append(first.experiment)
                continue
            streams = [str(row.get("batch_size", "")) for row in pair if row]
            cells = [f"`{first.experiment}`", first.topology]
            cells += [" / ".join(dict.fromkeys(streams)), *map(cell, pair)]
            cells += [] if most else [exchanged(pair[0])]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *unknown(missing)]
    return "\n".join(lines).rstrip() + "\n"


def unknown(missing: dict[str, list[str]]) -> list[str]:
    """Lists what has not been compiled yet."""
    every = len(SMALL) + len(LARGE)
    parts = (
        f"{place}: {'all' if len(names) == every else ', '.join(names)}"
        for place, names in missing.items()
    )
    return [f"Not run. {'; '.join(parts)}.", ""] if missing else []


HEAD = ("experiment", "GPUs", "streams", *(f"`{name}`, GiB" for name in KERNELS))
INTRODUCTION = """\
# The published models on NVIDIA GPUs

Nothing on this page was measured. XLA:GPU (jax 0.10.2) compiled each training step in
bfloat16 on a machine without a GPU; memory is that of one device, for the parameters,
the optimizer's state, the memory of the model and all temporary arrays. A step fits if
it needs at most three quarters of the GPU's memory, which is what jax reserves unless
told otherwise: 59.3 GiB of an H100 and 59.4 GiB of an A100 with 80 GB. Streams are
those of all GPUs: the published number, rounded up to a multiple of the GPUs. Without a
device the compiler cannot tune: which products it would fuse is unknown, so on a GPU
the memory may differ, and no times are given. The search for the most streams ends at
512 for each GPU. Two numbers of streams are those of `xla` and of `chunked`.
`python -m experiments.benchmarks.gpus` writes this page and `gpus.jsonl`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--topology", choices=TOPOLOGIES, help="compile only for these GPUs"
    )
    args = parser.parse_args()
    left, known = args.rows, read()
    for row in rows():
        if row in known or not left or args.topology not in (None, row.topology):
            continue
        left -= 1
        alone = known.get(row._replace(topology=TOPOLOGIES[0]), {})
        known[row] = measure(row, int(alone.get("streams_per_chip", 1)))
        record.append(LINES, known[row])
        print(json.dumps(known[row])[:300], flush=True)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
