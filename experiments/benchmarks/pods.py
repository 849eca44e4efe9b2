"""Compiles the published models for TPU slices; writes pods.jsonl and pods.md.

    pip install 'jax[tpu]'
    python -m experiments.benchmarks.pods [--only=TABLE] [--rows=N]

Each row is one command of `--mode=compile`, whose JSON becomes a line of pods.jsonl.
Existing rows are not compiled again. --rows=N compiles at most N rows; --rows=0 only
writes pods.md. No TPU is used: memory and collectives are those of the compiled
programs, and times are bounds.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.benchmarks import record
from experiments.benchmarks.pods_page import TITLES, cells, page

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "pods.jsonl", FOLDER / "pods.md"
# By the number of chips.
V4 = {
    4: "v4:2x2x1",
    8: "v4:2x2x2",
    16: "v4:2x2x4",
    32: "v4:2x4x4",
    64: "v4:4x4x4",
    128: "v4:4x4x8",
    256: "v4:4x8x8",
}
FLAT = {8: "2x4", 32: "4x8", 128: "8x16", 256: "16x16"}


def slices(kind: str) -> dict[int, str]:
    """Returns the slices of a kind of chip by their number of chips."""
    if kind in ("v4", "v5p"):
        return {n: name.replace("v4", kind) for n, name in V4.items()}
    return {n: f"{kind}:{shape}" for n, shape in FLAT.items()}


def commands() -> Iterator[tuple[str, str, str, str]]:
    """Yields (table, experiment, topology, flags) of every row, by priority."""
    for kernel in ("xla", "tpu"):
        own = f"--config.model.kernel={kernel}"
        plain = f"{own} --config.eval.streams=128"
        auto = f"{own} --mesh=auto --config.eval.streams=128"
        fsdp = f"{own} --config.mesh.fsdp=8 --config.eval.streams=256"
        yield "fit", "wt103_large", V4[128], plain
        yield "fit", "wt103_large", "v5e:16x16", auto
        yield "fit", "lm1b_large", "v5e:16x16", fsdp
    alone = "--mesh=auto --config.model.kernel=tpu"
    alone += " --config.model.dtype=bfloat16"
    # The paper used 32, 32, 64 and 512 TPU cores; a chip of v4 has two.
    for name, sizes in (
        ("wt103_large", (32, 8, 128, 256)),
        ("enwik8_24l", (16, 64, 256)),
        ("lm1b_large", (256, 64)),
        ("wt103", (4,)),
        ("enwik8", (4,)),
        ("wt103_nvidia", (8, 128)),
        ("wt103_nvidia_large", (8,)),
        ("text8", (16,)),
        ("enwik8_18l", (16,)),
        ("lm1b", (32,)),
        ("ptb", (4,)),
    ):
        for chips in sizes:
            yield "published", name, V4[chips], alone
    # 21 segments of 384 tokens are 8,064, 256 of 32 are 8,192.
    for name, streams in (("wt103_large", 21), ("lm1b_large", 256)):
        for chips in (8, 256, 32):
            for kind in ("v5e", "v4", "v5p", "v6e"):
                flags = f"{alone} --streams_per_chip={streams}"
                yield "weak", name, slices(kind)[chips], flags
        # Without remat, this model does not fit on v5e.
        if name == "lm1b_large":
            flags += " --config.model.remat_policy=full"
            for chips in (8, 256, 32):
                yield "weak", name, slices("v5e")[chips], flags


def run(table: str, name: str, topology: str, flags: str) -> dict[str, Any]:
    """Runs one row's command, and returns its JSON or its error message."""
    argv = ["--mode=compile", f"--topology={topology}", f"--config={name}"]
    argv += shlex.split(flags)
    row = {"table": table, "experiment": name, "flags": " ".join(argv)}
    row |= {"date": date.today().isoformat(), "libtpu": version("libtpu")}
    program = [sys.executable, "-m", "txl_jax.main", *argv]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *TITLES])
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    known = {row["flags"] for row in record.read(LINES)}
    left = args.rows
    for table, name, topology, flags in commands():
        wanted = f"--mode=compile --topology={topology} --config={name} {flags}"
        if wanted in known or args.only not in ("", table) or not left:
            continue
        left -= 1
        row = run(table, name, topology, flags)
        record.append(LINES, row)
        print(" | ".join(cells(row)), flush=True)
    PAGE.write_text(page(record.read(LINES)), "utf-8")


if __name__ == "__main__":
    main()
