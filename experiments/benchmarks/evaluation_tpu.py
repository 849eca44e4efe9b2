"""Estimates a TPU's cycles per token in evaluation; one JSON line.

    python -m experiments.benchmarks.evaluation_tpu --kernel=tpu --segments=0

Compiles the step of `enwik8`'s 12 layers for one v5e with L = 80, M = 2,100 and
--segments in a call (0 = chosen), and sums the compiler's estimates of its operations.
The kernel `tpu` is estimated from its schedule, with a full memory. No estimate
includes waiting for memory.
"""

import argparse
import dataclasses
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks import hlo, subject, tpu_estimate
from experiments.figures import program
from txl_jax.aot import lower
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.kernels.tpu import fused
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.state import abstract_segments, like_params

L, M = 80, 2100


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the cycles of a token."""
    schedules = tempfile.mkdtemp()
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={schedules} --xla_jf_dump_llo_text=true"
    )
    model = dataclasses.replace(subject.ENWIK8, kernel=args.kernel, dtype="bfloat16")
    config = EvalConfig(
        streams=1, tgt_len=L, mem_len=M, clamp_len=820, same_length=True,
        segments_per_step=args.segments,
    )  # fmt: skip
    jax.config.update("jax_platforms", "cpu")  # compiling needs no TPU
    mesh = make_mesh(MeshConfig(), lower.find_devices(lower.find_slices("v5e:2x4"))[:1])
    reader = make_reader(model, config, mesh)
    with jax.set_mesh(mesh):
        params = lower.abstract_result(reader.unstack, like_params(model, mesh))
        memory = lower.abstract_result(reader.empty, params)
    T = L * reader.n_segments
    segments = abstract_segments(mesh, 1, 1, T)
    done = lower.compile_step_for(mesh, reader.step, memory, params, segments)
    assert done.program
    program = hlo.HloProgram(done.program.as_text() or "")
    cycles = sum(
        int(found[1]) * times
        for op, _, times in program.visit(fusions=False)
        if (found := re.search(r'"estimated_cycles":"(\d+)"', op.text))
    )
    if args.kernel == "tpu":
        blocks = fused.choose("TPU v5 lite", T, M + T, model.d_head, 2)
        heads = [
            tpu_estimate.cycles_of_head(tpu_estimate.regions(path), blocks)
            for path in Path(schedules).glob("*rel_attention*final_bundles.txt")
            if "schedule-analysis" not in path.name
        ]
        cycles += round(statistics.fmean(heads)) * model.n_head * model.n_layer
    result = {"segments": reader.n_segments, "cycles_per_token": cycles / T}
    return {"kernel": args.kernel, **result}


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("--kernel", choices=("xla", "tpu"), default="tpu")
    parser.add_argument("--segments", type=int, default=0)
    return program.run(parser, estimate, argv)


if __name__ == "__main__":
    sys.exit(main())
