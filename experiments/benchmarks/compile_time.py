"""Times lowering and compiling a 12-layer training step; prints one JSON line.

    python -m experiments.benchmarks.compile_time

The model is the paper's for enwik8 with 22 streams of 512 tokens, compiled for each
attention kernel with and without dropout. The step is never run, so no parameters are
allocated.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from typing import Any

import jax

from experiments.benchmarks import quiet, record, subject
from experiments.benchmarks.job import Job, Step
from txl_jax.kernels.dispatch import KERNELS


def compile_all(
    args: argparse.Namespace, watch: quiet.Watch, dropout: float
) -> dict[str, Any]:
    """Times the compilation of the step with each kernel, in turn."""
    config = subject.shrink(subject.ENWIK8) if args.tiny else subject.ENWIK8
    config = dataclasses.replace(config, dropout=dropout, dropatt=dropout)
    lowering: dict[str, list[float]] = {name: [] for name in args.kernels}

    def compile_step(name: str, step: Step) -> None:
        lowering[name].append(step.compile().lower_seconds)

    programs = {}
    for name in args.kernels:
        job = Job(dataclasses.replace(config, kernel=name), batch_size=22, tgt_len=512)
        programs[name] = functools.partial(compile_step, name, Step(job))
    timings = quiet.alternate(programs, args.repeats, watch)
    more: dict[str, dict[str, Any]] = {}
    for name, timing in timings.items():
        lower = statistics.median(lowering[name][1:])  # the first is the warm-up
        more[name] = {
            "lower_seconds": round(lower, 2),
            "compile_seconds": round(timing.median - lower, 2),
        }
    return record.case(f"dropout {dropout}", 0, timings, **more)


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Compiles with and without dropout, with the compilation cache disabled."""
    jax.config.update("jax_enable_compilation_cache", False)
    return {"cases": [compile_all(args, watch, dropout) for dropout in (0.0, 0.1)]}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__, repeats=3)
    parser.add_argument(
        "--kernels", nargs="+", choices=list(KERNELS), default=["xla", "chunked"]
    )
    return record.run("compile_time", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
