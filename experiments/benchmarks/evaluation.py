"""Compares the throughput of evaluation with the peer's; prints one JSON line.

    python -m experiments.benchmarks.evaluation [--alone] [--read=score]

The model is the paper's 12 layers for enwik8, evaluated as in the paper: one stream,
segments of 80 tokens, a memory of 2,100, clamp_len 820 and same_length. Each call reads
a text from a cold start. For our side it includes the work done once per text. With
--alone, the other side is eval.segments_per_step = 1; --read selects what reads the
text: an evaluation, a score, RECL's context of that length, or a generation's prompt.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import peer, quiet, record, subject
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.evaluate.text_reader import TextReader, join
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import Reading, Sampler
from txl_jax.model.config import ModelConfig
from txl_jax.paper.recl import make_context_nll


def make_program(
    name: str, model_config: ModelConfig, config: EvalConfig, text_T: np.ndarray
) -> Callable[[], Any]:
    """Returns a program that reads the text in that way."""
    params, mesh = subject.make_params(model_config), subject.one_device()
    T = len(text_T) - 1
    if name == "evaluate":
        evaluate = make_evaluate(model_config, config, mesh)
        return lambda: evaluate(params, text_T, lambda *_: None)
    if name == "score":
        reader = TextReader(model_config, config)
        return lambda: [*map(join, reader.read(params, [text_T], text_T[:0]))]
    if name == "recl":
        nll = make_context_nll(model_config, config, params, mesh)
        return lambda: nll(text_T, np.array([T]), T, lambda *_: None)
    model_config = evaluation_model(model_config, config)
    options = GenerateConfig(mem_len=config.mem_len)
    reading = Reading(config.tgt_len, config.segments_per_step)
    sizes = {"batch_size": 1, "longest": len(text_T)}
    sampler = Sampler(model_config, params, options, **sizes, reading=reading)
    return lambda: jax.block_until_ready(sampler.prefill([text_T]))


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Times the reading of one text on both sides."""
    model_config = subject.ENWIK8
    config = EvalConfig(
        streams=1, tgt_len=80, mem_len=2100, clamp_len=820, same_length=True
    )
    if args.tiny:
        model_config = subject.shrink(model_config)
        config = dataclasses.replace(config, mem_len=100, clamp_len=50)
    text_T = subject.zipf_text(model_config.vocab_size, args.tokens + 1)
    programs = {"ours": make_program(args.read, model_config, config, text_T)}
    if args.alone:
        alone = dataclasses.replace(config, segments_per_step=1)
        programs["alone"] = make_program(args.read, model_config, alone, text_T)
    elif peer.is_available():
        other = peer.Peer(evaluation_model(model_config, config))
        programs["peer"] = lambda: other.call("evaluate", text_T[:-1], config.tgt_len)
    timings = quiet.alternate(programs, args.repeats, watch)
    name = f"{args.read}, segment {config.tgt_len}, memory {config.mem_len}"
    name = name.removeprefix("evaluate, ")
    cases = [record.case(name, args.tokens, timings)]
    return {"peer": peer.describe(), "cases": cases}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__)
    parser.add_argument(
        "--tokens", type=record.positive, default=4000, help="length of the text"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="compare with segments one by one, not the peer",
    )
    parser.add_argument(
        "--read", choices=["evaluate", "score", "recl", "prompt"], default="evaluate"
    )
    return record.run("evaluation", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
