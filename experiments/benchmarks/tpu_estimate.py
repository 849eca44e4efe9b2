"""The TPU compiler's estimates for the attention kernels, without a TPU.

    pip install libtpu
    python -m experiments.benchmarks.tpu_estimate [--chips=v5e,v5p] [--kernels=xla,tpu]
        [--shapes=22x8x64x512x512] [--dropout=0.1] [--dtype=bfloat16] [--schedule=0]
        [--position=rotary]

The program prints JSON lines. A shape is B x H x A x L x M. Each row is a program that
computes the output and all gradients of one attention with a full memory, compiled by
libtpu for one chip:

    temporary_mib   memory beyond inputs (`input_mib`) and results; XLA may place part
                    of it in VMEM, which is not counted
    largest         elements of the largest array in the compiled program
    xla_cycles      the sum of the compiler's `estimated_cycles`, which Pallas kernels
                    lack
    kernel_cycles   the kernels' static schedule: instruction bundles of the visited
                    tiles, one per cycle, without waits for memory and the overhead
                    of grid steps
    total_cycles    their sum; on v5p the kernels' share is halved, for two cores

`--position` is transformer_xl (the default), rotary (no term by distance; the rotation
of queries and keys is not part of a program), alibi (a bias, with its gradient) or
shaw_biased (r, u and a bias).

All cycles are estimates; none is measured. `--table` prints Markdown instead of JSON,
which is how `tpu_estimate.md` was made. Compiling with the dump that contains the
schedule takes about a minute per row; `--schedule=0` omits it.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.benchmarks import record
from experiments.figures import program

CHIPS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4"}
SHAPES = (
    "22x8x64x512x512",
    "16x16x64x384x384",
    "8x8x128x768x768",
    "1x16x64x4096x4096",
    "60x10x41x150x150",
    "1x16x64x8192x8192",
)
CORES = {"v5p": 2}
MIB = 2**20
PER_TILE = 200  # the fewest bundles of a region that runs once per query tile


def compiled(row: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the compiled attention of a row, and its blocks."""
    import jax
    import jax.numpy as jnp

    from txl_jax.aot import lower
    from txl_jax.kernels import sharded, xla
    from txl_jax.kernels.hash import AttentionDropout
    from txl_jax.kernels.operands import Operands, PositionTerms
    from txl_jax.kernels.tpu import fused as tpu

    jax.config.update("jax_platforms", "cpu")  # compiling needs no TPU
    B, H, A, L, M = row["shape"]
    K = M + L
    devices = lower.find_devices(lower.find_slices(CHIPS[row["chip"]]))
    mesh = jax.sharding.Mesh(devices[:1], ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape: int, dtype: str = row["dtype"]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def gradients(inputs: Any, oldest_BL: Any, seed: Any, do_BLHA: Any) -> Any:
        dropout = AttentionDropout(row["dropout"], seed) if row["dropout"] else None
        kernel = {"xla": xla, "tpu": tpu}[row["kernel"]].rel_attention

        def run(*inputs: Any) -> jax.Array:
            q_BLHA, k_BKHA, v_BKHA, *terms = inputs
            position = PositionTerms(*terms)
            return kernel(
                Operands(q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout)
            )

        o_BLHA, pull = jax.vjp(run, *inputs)
        return o_BLHA, pull(do_BLHA)

    keys, biases = array(B, K, H, A), array(H, A, dtype="float32")
    bias_HK = array(H, K, dtype="float32")
    terms = {
        "transformer_xl": (array(K, H, A), biases, biases, None),
        "rotary": (None,) * 4,
        "alibi": (None, None, None, bias_HK),
        "shaw_biased": (array(K, H, A), biases, None, bias_HK),
    }[row["position"]]
    inputs = (array(B, L, H, A), keys, keys, *terms)
    with jax.set_mesh(mesh):
        lowered = jax.jit(gradients).lower(
            inputs,
            array(B, L, dtype="int32"),
            array(dtype="uint32"),
            array(B, L, H, A),
        )
        itemsize = jnp.dtype(row["dtype"]).itemsize
        blocks = tpu.choose(sharded.target_device().device_kind, L, K, A, itemsize)
        return lowered.compile(), blocks


def regions(path: Path) -> list[int]:
    """Returns the bundles of each basic block of a scheduled kernel, in order."""
    sizes = [0]
    for line in path.open():
        bundle = re.match(r"\s*(?:0x)?[0-9a-f]+\s+(\w\w)?\s*:", line)
        if not bundle:
            continue
        if bundle[1]:
            sizes.append(0)
        sizes[-1] += 1
        if "sbr.rel" in line:
            sizes.append(0)
    return sizes


def cycles_of_head(sizes: list[int], blocks: Any) -> int:
    """Returns the bundles that one head of one stream runs with a full memory.

    The three largest regions are, in order, the step on the diagonal, the step without
    a mask and the step with a mask. Other large regions run once per query tile (some
    only once per head), small regions in every step of the grid. With a single tile of
    keys, only the diagonal is visited and all regions run.
    """
    if blocks.key_tiles == 1:
        return sum(sizes)
    largest = sorted(range(len(sizes)), key=lambda n: sizes[n])[-3:]
    diagonal, clear, masked = (sizes[n] for n in sorted(largest))
    others = [size for n, size in enumerate(sizes) if n not in largest]
    per_tile = sum(size for size in others if size >= PER_TILE)
    per_step = sum(size for size in others if size < PER_TILE)
    total = blocks.query_tiles * blocks.key_tiles * per_step
    for i in range(blocks.query_tiles):
        behind = blocks.diagonal(i)
        edges = min(behind, 1) if blocks.hidden_keys else 0
        total += per_tile + diagonal + (behind - edges) * clear + edges * masked
    return total


def scheduled(dump: str, blocks: Any, heads: int, chip: str) -> int:
    """Returns the cycles of `heads` heads in a dump's kernels, over all cores."""
    paths = Path(dump).glob("*rel_attention*final_bundles.txt")
    kernels = [path for path in paths if "schedule-analysis" not in path.name]
    each = sum(cycles_of_head(regions(path), blocks) for path in kernels)
    return heads * each // CORES.get(chip, 1)


def measure(row: dict[str, Any], dump: str) -> dict[str, Any]:
    """Returns the row with the compiler's estimates."""
    program, blocks = compiled(row)
    text, memory = program.as_text(), program.memory_analysis()
    shapes = re.findall(r"\b(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", text)
    stated = re.findall(r'"estimated_cycles":"(\d+)"', text)
    row |= {
        "input_mib": memory.argument_size_in_bytes / MIB,
        "temporary_mib": memory.temp_size_in_bytes / MIB,
        "largest": max(math.prod(map(int, shape.split(","))) for shape in shapes),
        "xla_cycles": sum(map(int, stated)),
    }
    if row["kernel"] == "xla":
        return row | {"total_cycles": row["xla_cycles"]}
    B, H, _, L, M = row["shape"]
    exact = L * M + L * (L + 1) // 2
    row |= {"tile": blocks.tile, "vmem_mib": blocks.vmem / MIB}
    row |= {"scores_per_visible": round(blocks.scores() / exact, 2)}
    if dump:
        row["kernel_cycles"] = scheduled(dump, blocks, B * H, row["chip"])
        row["total_cycles"] = row["kernel_cycles"] + row["xla_cycles"]
    return row


def run(row: dict[str, Any], schedule: bool) -> dict[str, Any]:
    """Measures a row in a new process, because libtpu reads its flags only once."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        dump = folder if schedule and row["kernel"] == "tpu" else ""
        if dump:
            flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
            environment["LIBTPU_INIT_ARGS"] = flags
        command = [sys.executable, "-m", "experiments.benchmarks.tpu_estimate"]
        command += ["--row", json.dumps([row, dump])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return row | {
            "error": next((x for x in lines if "Error" in x), lines[-1])[:300]
        }
    return json.loads(done.stdout.splitlines()[-1])


def tabulate(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table that compares xla and tpu by chip and shape."""
    lines = [
        "| chip | B x H x A x L x M | xla MiB | tpu MiB | xla cycles | tpu cycles "
        "| of them kernels | xla / tpu | scores / visible |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for xla, tpu in zip(rows[::2], rows[1::2], strict=True):
        cells = [tpu["chip"], " x ".join(map(str, tpu["shape"]))]
        ratio = "does not fit"
        if "error" in tpu:
            lines.append(f"| {' | '.join([*cells, *[''] * 5, 'refused', ''])} |")
            continue
        if "error" in xla:
            cells += ["out of memory", f"{tpu['temporary_mib']:,.0f}", ""]
        else:
            cells += [f"{row['temporary_mib']:,.0f}" for row in (xla, tpu)]
            cells += [f"{xla['total_cycles'] / 1e6:.1f} M"]
            ratio = f"{xla['total_cycles'] / tpu['total_cycles']:.1f}"
        cells += [
            f"{tpu[name] / 1e6:.1f} M" for name in ("total_cycles", "kernel_cycles")
        ]
        lines.append(
            f"| {' | '.join([*cells, ratio, str(tpu['scores_per_visible'])])} |"
        )
    return "\n".join(lines)


def estimate(args: argparse.Namespace) -> None:
    """Prints a row for each program, or their table."""
    if args.row:
        print(json.dumps(measure(*json.loads(args.row))))
        return
    rows = []
    for chip, shape, kernel in itertools.product(
        *(names.split(",") for names in (args.chips, args.shapes, args.kernels))
    ):
        row = {"chip": chip, "shape": [int(size) for size in shape.split("x")]}
        row |= {"kernel": kernel, "dtype": args.dtype, "dropout": args.dropout}
        row["position"] = args.position
        rows.append(run(row, bool(args.schedule)))
        if not args.table:
            print(json.dumps(rows[-1]), flush=True)
    if args.table:
        print(tabulate(rows))


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--chips", default="v5e")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kernels", default="xla,tpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--position", default="transformer_xl")
    parser.add_argument("--schedule", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return program.run(parser, estimate, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
