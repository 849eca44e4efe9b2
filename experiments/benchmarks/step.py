"""Tokens a second of training, and the peer's: one JSON line.

    python -m experiments.benchmarks.step [--kernel=chunked]

An update with Adam and a clip, dropout 0.1, of two models: `small`, 6 layers of 256
that read 8 streams of 128 bytes, and `wikitext`, the paper's standard model for
WikiText-103 with its adaptive softmax over 267,735 words, 4 streams of 150. Words come
as often as Zipf's law says, since a softmax's cost follows them. `wikitext` needs some
8 GB. `bytes_above` is the memory beside parameters, moments and one gradient: ours as
the compiler has it, the peer's from the most that its process ever had.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax

from experiments.benchmarks import peer, quiet, record, subject
from experiments.benchmarks.job import OPTIM, Job, Step
from txl_jax.kernels.choice import NAMES

JOBS = {
    "small": Job(subject.SMALL, batch_size=8, tgt_len=128),
    "wikitext": Job(subject.WIKITEXT, batch_size=4, tgt_len=150),
}


def train(given: argparse.Namespace, watch: quiet.Watch, name: str) -> dict[str, Any]:
    """Measures updates of one model."""
    job = JOBS[name]
    config = subject.shrink(job.config) if given.tiny else job.config
    config = dataclasses.replace(config, kernel=given.kernel)
    job = dataclasses.replace(job, config=config)
    ours = Step(job)
    compiled = ours.compile()
    programs = {"ours": quiet.times(given.updates, ours.update)}
    if peer.there():
        other = peer.Peer(config)
        other.call("make_optimizer", OPTIM.lr, OPTIM.clip)
        tokens_BL = job.text()[:-1].reshape(job.batch_size, job.tgt_len)
        update = functools.partial(other.call, "train", tokens_BL)
        programs["peer"] = quiet.times(given.updates, update)
    timings = quiet.alternate(programs, given.repeats, watch)
    described = compiled.describe()
    gradient = 4 * sum(leaf.size for leaf in jax.tree.leaves(ours.state.params))
    temporary = described["temporary_bytes"]
    above = None if temporary is None else temporary - gradient
    more = {"ours": described | {"bytes_above": above}}
    if "peer" in timings:
        more["peer"] = {"bytes_above": other.call("bytes_above")}
    return record.case(name, given.updates * job.tokens, timings, **more)


def measure(given: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures each model."""
    cases = [train(given, watch, name) for name in given.models]
    return {"peer": peer.found(), "kernel": given.kernel, "cases": cases}


def main() -> None:
    parser = record.make_parser(__doc__)
    parser.add_argument("--kernel", choices=list(NAMES), default="auto")
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument(
        "--updates", type=record.positive, default=4, help="of a repetition"
    )
    record.run("step", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
