"""The TPU compiler's estimates for a training step on one chip: tpu_step.md.

    pip install 'jax[tpu]'
    python -m experiments.benchmarks.tpu_step [--only=step|largest|batch|operation]
        [--rows=N]

libtpu compiles the step that `train` runs (forward, backward and optimizer) with one
chip's share of the published batch, in bfloat16, with each attention kernel. The page
is made from the rows in tpu_step.jsonl. Existing rows are not compiled again. --rows=N
compiles at most N rows; --rows=0 only writes the page.

    step      memory, traffic and cycles, as the compiler states them, and the static
              schedule of the Pallas kernels, read as `tpu_estimate` reads it
    largest   the most streams that fit
    batch     the step with the streams of tpu_step_rows.BATCH and the recipe's remat
              policy, with a scan over layers and without; `before` is the first for an
              older revision of the package, made by
              --row='[{"part": "before", ...}, ""]' with this file in its checkout
    operation cycles of lone operations, whose least number is known

No TPU is used: all cycles are estimates.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from experiments.benchmarks import record, tpu_estimate, tpu_operations
from experiments.benchmarks.tpu_step_page import page
from experiments.benchmarks.tpu_step_rows import STREAMS, Row, find, wanted
from txl_jax import config as configs
from txl_jax.aot import chips
from txl_jax.aot.hlo import Program
from txl_jax.aot.traffic import by_scope, hbm_bytes
from txl_jax.cli import steps
from txl_jax.cli.compile import largest_batch
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.kernels import cluster, tiles
from txl_jax.kernels.tpu import blocks as tpu_blocks
from txl_jax.model.flops import needed_flops, zipf

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "tpu_step.jsonl", FOLDER / "tpu_step.md"
NAME = "experiments.benchmarks.tpu_step"


def read(row: Row) -> Config:
    """Returns the config that a row compiles."""
    name = row["experiment"]
    config = steps.find_vocab(configs.parse(configs.load(name)))
    config = steps.replace(config, "model", dtype="bfloat16", kernel=row["kernel"])
    if row["part"] == "batch":
        config = steps.replace(config, "model", unroll=row["unroll"])
    else:
        config = steps.replace(config, "model", remat_policy="none")
    streams = row.get("streams") or STREAMS[name]
    return steps.replace(config, "train", batch_size=streams)


def attention_shape(config: Config) -> tuple[int, int, int, int, int]:
    """Returns B, H, A, L, M of one layer's attention."""
    model, train = config.model, config.train
    return train.batch_size, model.n_head, model.d_head, train.tgt_len, model.mem_len


def chunked_turns(config: Config) -> float:
    """Returns the mean number of tiles behind the diagonal of a block of `chunked`.

    The memory is full and every query sees all of it, as in training.
    """
    B, H, A, L, M = attention_shape(config)
    X, Y = tiles.choose_blocks(B * H, L, M + L)
    plan = tiles.make_plan(L, M + L, X, Y, config.model.dropatt)
    ends = (M + L - block * X for block in range(plan.Q))
    return sum(-(-end // Y) - 1 for end in ends) / plan.Q


def rare_turns(config: Config) -> float:
    """Returns the mean number of blocks of a rare cluster's tokens, by Zipf's law.

    Each block of rows visits the tokens of its cluster, so clusters count by rows.
    """
    model, train = config.model, config.train
    if not model.cutoffs:
        return 1
    T, (scores, rows, _) = train.batch_size * train.tgt_len, cluster.ACCELERATOR.rare
    shares_G = zipf(model.vocab_size, model.cutoffs)[1:]
    sizes_G = np.diff((*model.cutoffs, model.vocab_size))
    X_G = np.minimum(T, scores // np.minimum(sizes_G, rows))
    blocks_G = np.ceil(T * np.array(shares_G) / X_G)
    return float(np.average(blocks_G, weights=np.ceil(sizes_G / rows)))


def cycles_by_path(program: Program) -> dict[str, float]:
    """Returns the cycles that the TPU compiler estimates, by `Op.path`.

    It gives no estimate for Pallas kernels, collectives and asynchronous copies.
    """
    total: dict[str, float] = defaultdict(float)
    for op, name, times in program.visit():
        if stated := re.search(r'"estimated_cycles":"(\d+)"', op.text):
            total[program.purpose(name, op.name)] += times * int(stated[1])
    return dict(total)


def pallas_calls(program: Program) -> dict[str, float]:
    """Returns how often each Pallas kernel runs, by `Op.path`."""
    total: dict[str, float] = defaultdict(float)
    for op, _, times in program.visit():
        if op.kind == "custom-call" and "tpu_custom_call" in op.text:
            total[op.path] += times
    return dict(total)


def vmem(dump: str) -> tuple[int, int]:
    """Returns the peak VMEM use of a dumped program, and the VMEM capacity, in bytes.

    The peak counts XLA's arrays and the scratch memory of one operation.
    """
    (path,) = Path(dump).glob("*vmem_report.html")
    text = path.read_text("utf-8")
    report, _ = json.JSONDecoder().raw_decode(text, text.index("DATA =") + 6)
    taken = report["hlo_breakdowns"]["<top-inlining-caller>"]["total_size"]
    return taken, report["global_info"]["vmem_capacity"]


def measure_step(row: Row, dump: str) -> Row:
    """Returns the row with the compiler's estimates for one update."""
    config, part = read(row), chips.find(tpu_estimate.CHIPS[row["chip"]][0])
    devices = chips.find_devices(part)[:1]
    done = steps.compile_train(config, devices)
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
    calls = config.train.updates_of_call(config.checkpoint.every_steps)
    program = Program(done.text, assumed)
    cycles = by_scope(cycles_by_path(program))
    B, H, A, L, M = attention_shape(config)
    pallas = pallas_calls(program)
    row |= {
        "assumed_turns": assumed,
        "model_flops": needed_flops(config.model, B, L, training=True),
        "kernel_runs": sum(pallas.values()) / calls,
        "hbm_traffic_bytes": int(sum(hbm_bytes(program).values()) / calls),
        "xla_cycles": int(sum(cycles.values()) / calls),
        "xla_cycles_by_scope": {k: int(each / calls) for k, each in cycles.items()},
    }
    if row["part"] != "step":
        return row
    taken, capacity = vmem(dump)
    row |= {"vmem_bytes": taken, "vmem_capacity_bytes": capacity, "kernel_cycles": 0}
    if pallas:
        # The forward and the backward kernel run once per layer each.
        (times,) = set(pallas.values())
        blocks = tpu_blocks.choose(devices[0].device_kind, L, M + L, A)
        layer = tpu_estimate.scheduled(dump, blocks, B * H, row["chip"])
        row["kernel_cycles"] = int(times / calls * layer)
    return row


def measure_largest(row: Row, _: str) -> Row:
    """Returns the most streams that fit on one chip."""
    part = chips.find(tpu_estimate.CHIPS[row["chip"]][0])
    devices = chips.find_devices(part)[:1]
    one = part._replace(shape=(1,))
    try:
        config, _done = largest_batch(read(row), devices, one)
    except UserError:
        return row | {"streams": 0}
    return row | {"streams": config.train.batch_size}


def measure_operation(row: Row, _: str) -> Row:
    """Returns the estimate for one operation, and the fewest cycles it can take."""
    text, least = tpu_operations.compiled(row["operation"], row["chip"])
    cycles = math.fsum(cycles_by_path(Program(text)).values())
    return row | {"xla_cycles": int(cycles), "least_cycles": int(least)}


MEASURES = {
    "step": measure_step,
    "largest": measure_largest,
    "batch": measure_step,
    "before": measure_step,
    "operation": measure_operation,
}


def dump_flags(row: Row, dump: str) -> str:
    """Returns the flags that make libtpu dump what the row's measure reads."""
    if row["part"] != "step":
        return ""
    # Every dump includes the VMEM report.
    label = "final_bundles" if row["kernel"] == "tpu" else "none"
    return (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={label}"
    )


def run(row: Row) -> Row | None:
    """Measures a row in a new process, because libtpu reads its flags only once.

    Returns None if the process fails; its error is on stderr.
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
    origin = {"libtpu": version("libtpu"), "date": date.today().isoformat()}
    return json.loads(done.stdout.splitlines()[-1]) | origin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *MEASURES])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        row, dump = json.loads(args.row)
        print(json.dumps(MEASURES[row["part"]](row, dump)))
        return
    left = args.rows
    for row in wanted():
        done = find(record.read(LINES), **row)
        if done or args.only not in ("", row["part"]) or not left:
            continue
        left -= 1
        if made := run(row):
            record.append(LINES, made)
        print(json.dumps(made or row | {"failed": True}), flush=True)
    PAGE.write_text(page(record.read(LINES)), "utf-8")


if __name__ == "__main__":
    main()
