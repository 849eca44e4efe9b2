"""Compares the throughput of training with the peer's; prints one JSON line.

    python -m experiments.benchmarks.step [--kernel=chunked]
    python -m experiments.benchmarks.step --models=small --gradient_segments 1 2 4 8
    python -m experiments.benchmarks.step --models=small --fast_weights
    python -m experiments.benchmarks.step --models ptb wikitext2 --dtypes

Updates use Adam with clipping and dropout 0.1. Both sides train in float32 and in
bfloat16, for the peer by PyTorch's autocast; the ratio compares the faster ones.
`small` has 6 layers of 256 and reads 8 streams of 128 bytes; `wikitext` is the paper's
standard model for WikiText-103 with its adaptive softmax over 267,735 words, reads 4
streams of 150 and needs about 8 GB; `enwik8` and `enwik8_4` have the paper's 12 layers,
or 4 of them, and the others are the experiments of these names. Words follow Zipf's
law, because the cost of an adaptive softmax depends on their distribution.
`bytes_above` is the memory beyond parameters, moments and one gradient, from the
compiler for our side and from the peak of the process for the peer.

Other comparisons, without the peer: with --gradient_segments, updates of equally many
segments by the number of segments that their gradients cross; with --fast_weights, a
model with fast weights and the same model without; with --dtypes, both dtypes, with the
layers in a scan and unrolled.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from experiments.benchmarks import peer, quiet, record, subject
from experiments.benchmarks.job import OPTIM, Job, Step
from txl_jax import config as configs
from txl_jax.kernels.dispatch import KERNELS

FOUR = dataclasses.replace(subject.ENWIK8, n_layer=4)
# The sizes of the experiments' vocabularies.
SIZES = {"ptb": 10_000, "wikitext2": 33_278, "shakespeare": 65, "quickstart": 256}


def load_job(name: str) -> Job:
    """Returns the job of an experiment."""
    config = configs.load(name)
    model = dataclasses.replace(config.model, vocab_size=SIZES[name])
    return Job(model, config.train.batch_size, config.train.tgt_len)


JOBS = {
    "small": Job(subject.SMALL, batch_size=8, tgt_len=128),
    "wikitext": Job(subject.WIKITEXT, batch_size=4, tgt_len=150),
    "enwik8": Job(subject.ENWIK8, batch_size=2, tgt_len=512),
    "enwik8_4": Job(FOUR, batch_size=4, tgt_len=512),
    **{name: load_job(name) for name in SIZES},
}


def train(args: argparse.Namespace, watch: quiet.Watch, name: str) -> dict[str, Any]:
    """Times the updates of one model."""
    job = make_job(args, name)
    tokens_BL = job.text()[:-1].reshape(job.batch_size, job.tgt_len)
    updates: dict[str, Callable[[], Any]] = {}
    describe: dict[str, Callable[[], dict[str, Any]]] = {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(job.config, dtype=dtype)
        ours = Step(dataclasses.replace(job, config=config))
        ours.compile()
        updates[f"ours, {dtype}"] = ours.update
        describe[f"ours, {dtype}"] = functools.partial(describe_ours, ours)
        if peer.is_available():
            other = peer.Peer(config)
            other.call("make_optimizer", OPTIM.lr, OPTIM.clip)
            updates[f"peer, {dtype}"] = functools.partial(
                other.call, "train", tokens_BL
            )
            describe[f"peer, {dtype}"] = functools.partial(describe_peer, other)
    programs = {side: quiet.times(args.updates, call) for side, call in updates.items()}
    timings = quiet.alternate(programs, args.repeats, watch)
    described = {side: call() for side, call in describe.items()}
    result = record.case(name, args.updates * job.tokens, timings, **described)
    if peer.is_available():
        ours_seconds, peer_seconds = (
            min(timings[f"{side}, {dtype}"].median for dtype in ("float32", "bfloat16"))
            for side in ("ours", "peer")
        )
        result["ratio"] = round(peer_seconds / ours_seconds, 3)
    return result


def describe_ours(step: Step) -> dict[str, Any]:
    """Returns the compiled step's costs."""
    described = step.compiled.describe()
    gradient = 4 * sum(leaf.size for leaf in jax.tree.leaves(step.state.params))
    temporary = described["temporary_bytes"]
    above = None if temporary is None else temporary - gradient
    return described | {"bytes_above": above}


def describe_peer(other: peer.Peer) -> dict[str, Any]:
    """Returns the peer's memory."""
    return {"bytes_above": other.call("bytes_above")}


def cross(args: argparse.Namespace, watch: quiet.Watch, name: str) -> dict[str, Any]:
    """Times the updates of one model by the segments that their gradients cross.

    An update has more segments than in `train`, so a repetition has fewer updates.
    """
    job = make_job(args, name)
    job = dataclasses.replace(job, segments=max(args.gradient_segments))
    jobs = {
        f"across {G}": dataclasses.replace(job, gradient_segments=G)
        for G in args.gradient_segments
    }
    return compare(args, watch, name, jobs, max(args.updates // job.segments, 1))


def add_fast_weights(
    args: argparse.Namespace, watch: quiet.Watch, name: str
) -> dict[str, Any]:
    """Times the updates of one model with pre_lnorm, with and without fast weights."""
    job = make_job(args, name)
    jobs = {
        side: dataclasses.replace(
            job,
            config=dataclasses.replace(
                job.config, pre_lnorm=True, fast_weights=side == "fast weights"
            ),
        )
        for side in ("fast weights", "plain")
    }
    return compare(args, watch, name, jobs, args.updates)


def change_dtypes(
    args: argparse.Namespace, watch: quiet.Watch, name: str
) -> dict[str, Any]:
    """Times the updates of one model by dtype, in a scan over layers and unrolled."""
    job = make_job(args, name)
    jobs = {
        f"{dtype}, {'a scan' if unroll else 'unrolled'}": dataclasses.replace(
            job, config=dataclasses.replace(job.config, dtype=dtype, unroll=unroll)
        )
        for dtype in ("float32", "bfloat16")
        for unroll in (1, 0)
    }
    return compare(args, watch, name, jobs, args.updates)


def make_job(args: argparse.Namespace, name: str) -> Job:
    """Returns the job of a model, as the flags change it."""
    job = JOBS[name]
    config = subject.shrink(job.config) if args.tiny else job.config
    config = dataclasses.replace(config, kernel=args.kernel)
    return dataclasses.replace(job, config=config)


def compare(
    args: argparse.Namespace,
    watch: quiet.Watch,
    name: str,
    jobs: dict[str, Job],
    updates: int,
) -> dict[str, Any]:
    """Times the updates of several jobs with equally many tokens."""
    steps = {side: Step(job) for side, job in jobs.items()}
    described = {side: step.compile().describe() for side, step in steps.items()}
    programs = {side: quiet.times(updates, step.update) for side, step in steps.items()}
    timings = quiet.alternate(programs, args.repeats, watch)
    tokens = max(job.tokens for job in jobs.values())
    return record.case(name, updates * tokens, timings, **described)


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures each model."""
    time = cross if args.gradient_segments else train
    time = add_fast_weights if args.fast_weights else time
    time = change_dtypes if args.dtypes else time
    cases = [time(args, watch, name) for name in args.models]
    return {"peer": peer.describe(), "kernel": args.kernel, "cases": cases}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__)
    parser.add_argument("--kernel", choices=["auto", *KERNELS], default="auto")
    parser.add_argument(
        "--models", nargs="+", choices=list(JOBS), default=["small", "wikitext"]
    )
    parser.add_argument(
        "--updates", type=record.positive, default=4, help="updates in a repetition"
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--gradient_segments", type=record.positive, nargs="+")
    compared.add_argument("--fast_weights", action="store_true")
    compared.add_argument("--dtypes", action="store_true")
    return record.run("step", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
