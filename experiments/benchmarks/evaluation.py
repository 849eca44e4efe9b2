"""Tokens a second of evaluation, and the peer's: one JSON line.

    python -m experiments.benchmarks.evaluation

The paper's 12 layers for enwik8, as it evaluates them: segments of 80, a memory of
2,100, distances clamped at 820, every token seeing as many; one stream. A call reads a
text from a cold start; ours has in it what is made once for a text.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import peer, quiet, record, subject
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model, make_evaluate


def measure(given: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Reads one text in both."""
    config = subject.ENWIK8
    how = EvalConfig(
        streams=1, tgt_len=80, mem_len=2100, clamp_len=820, same_length=True
    )
    if given.tiny:
        config = subject.shrink(config)
        how = dataclasses.replace(how, mem_len=100, clamp_len=50)
    text_T = subject.zipf_text(config.vocab_size, given.tokens + 1)
    params = subject.make_params(config)
    evaluate = make_evaluate(config, how, subject.one_device())
    programs: dict[str, Callable[[], Any]] = {
        "ours": lambda: evaluate(params, text_T, lambda *_: None)
    }
    if peer.there():
        other = peer.Peer(evaluation_model(config, how))
        programs["peer"] = lambda: other.call("evaluate", text_T[:-1], how.tgt_len)
    timings = quiet.alternate(programs, given.repeats, watch)
    name = f"segment {how.tgt_len}, memory {how.mem_len}"
    cases = [record.case(name, given.tokens, timings)]
    return {"peer": peer.found(), "cases": cases}


def main() -> None:
    parser = record.make_parser(__doc__)
    parser.add_argument(
        "--tokens", type=record.positive, default=4000, help="of the text"
    )
    record.run("evaluation", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
