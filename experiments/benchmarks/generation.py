"""Compares the throughput of generation with the peer's and a memory bound.

    python -m experiments.benchmarks.generation

The model is the paper's 12 layers for enwik8, with one stream and one token at a time.
The time to read the prompt is not counted; our compile_seconds includes it. Each token
reads all weights and each layer's keys, values and distances once, so memory bandwidth
bounds the throughput. The bound is the time of a matrix-vector product that reads as
many bytes, measured in turn with both sides. Prints one JSON line.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import peer, quiet, record, subject
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.generate.sampler import EVERY, stream
from txl_jax.model.config import ModelConfig

PART = EVERY  # tokens in a repetition
COLUMNS = 4096  # in the matrix


def bytes_read(config: ModelConfig, params: Any) -> int:
    """Returns the bytes that a token reads: weights, and k, v and r of every layer.

    The weights that compute r are excluded: r is computed once.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    weights -= params["layers"]["attention"]["r"].nbytes
    row = config.n_head * config.d_head * config.compute_dtype.itemsize
    return int(weights + config.n_layer * (3 * config.mem_len + 1) * row)


def make_reader(size: int) -> Callable[[], Any]:
    """Returns a matrix-vector product that reads about `size` bytes."""
    matrix = jnp.ones((math.ceil(size / 4 / COLUMNS), COLUMNS))
    vector = jnp.ones(COLUMNS)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(matrix, vector).block_until_ready()


def generate(
    args: argparse.Namespace, watch: quiet.Watch, mem_len: int
) -> dict[str, Any]:
    """Measures generation with a memory of mem_len tokens, filled by a prompt."""
    model_config = subject.shrink(subject.ENWIK8) if args.tiny else subject.ENWIK8
    # One part is read with the prompt, one is the warm-up, the others are timed.
    count = PART * (quiet.MOST_TURNS * args.repeats + 2)
    config = GenerateConfig(mem_len=mem_len, num_tokens=count)
    model_config = generation_model(model_config, config)
    params = subject.make_params(model_config)
    prompt_T = subject.zipf_text(model_config.vocab_size, mem_len + 1)
    parts = stream(model_config, params, [prompt_T], config)
    started = quiet.clock(lambda: next(parts))
    programs: dict[str, Callable[[], Any]] = {"ours": lambda: next(parts)}
    if peer.is_available():
        other = peer.Peer(model_config)
        programs["peer"] = lambda: other.call("generate", PART, config.top_k)
    size = bytes_read(model_config, params)
    programs["reader"] = quiet.times(PART, make_reader(size))
    timings = quiet.alternate(programs, args.repeats, watch)
    reader = timings.pop("reader")
    start = {"compile_seconds": round(started - timings["ours"].median, 2)}
    case = record.case(f"memory {mem_len}", PART, timings, ours=start)
    case["sides"]["bound"] = reader.describe(PART) | {
        "bytes_per_token": size,
        "gigabytes_per_second": round(size * PART / reader.median / 1e9, 2),
    }
    case["of_the_bound"] = round(reader.median / timings["ours"].median, 3)
    return case


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures each memory length."""
    cases = [generate(args, watch, mem_len) for mem_len in args.memories]
    return {"peer": peer.describe(), "cases": cases}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__)
    parser.add_argument(
        "--memories", type=record.positive, nargs="+", default=[2100, 512]
    )
    return record.run("generation", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
