"""Compares the throughput of evaluation with the peer's; prints one JSON line.

    python -m experiments.benchmarks.evaluation

The model is the paper's 12 layers for enwik8, evaluated as in the paper: one stream,
segments of 80 tokens, a memory of 2,100, clamp_len 820 and same_length. Each call reads
a text from a cold start. For our side it includes the work done once per text. With
--alone, the other side is eval.segments_per_step = 1.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import peer, quiet, record, subject
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Times the evaluation of one text on both sides."""
    model_config = subject.ENWIK8
    config = EvalConfig(
        streams=1, tgt_len=80, mem_len=2100, clamp_len=820, same_length=True
    )
    if args.tiny:
        model_config = subject.shrink(model_config)
        config = dataclasses.replace(config, mem_len=100, clamp_len=50)
    text_T = subject.zipf_text(model_config.vocab_size, args.tokens + 1)
    params = subject.make_params(model_config)
    evaluate = make_evaluate(model_config, config, subject.one_device())
    programs: dict[str, Callable[[], Any]] = {
        "ours": lambda: evaluate(params, text_T, lambda *_: None)
    }
    if args.alone:
        alone = make_evaluate(
            model_config,
            dataclasses.replace(config, segments_per_step=1),
            subject.one_device(),
        )
        programs["alone"] = lambda: alone(params, text_T, lambda *_: None)
    elif peer.is_available():
        other = peer.Peer(evaluation_model(model_config, config))
        programs["peer"] = lambda: other.call("evaluate", text_T[:-1], config.tgt_len)
    timings = quiet.alternate(programs, args.repeats, watch)
    name = f"segment {config.tgt_len}, memory {config.mem_len}"
    cases = [record.case(name, args.tokens, timings)]
    return {"peer": peer.describe(), "cases": cases}


def main() -> None:
    parser = record.make_parser(__doc__)
    parser.add_argument(
        "--tokens", type=record.positive, default=4000, help="length of the text"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="compare with segments one by one, not the peer",
    )
    record.run("evaluation", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
