"""Tokens a second of generation, the peer's, and what memory allows: one JSON line.

    python -m experiments.benchmarks.generation

The paper's 12 layers for enwik8, one stream, one token at a time. Reading the prompt is
not counted; it is in our compile_seconds. Every token reads all weights, and every
layer's keys, values and distances, once: no program is faster than memory gives them.
The bound is what the product of a matrix of so many bytes with a vector takes, measured
in turn with the two.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import peer, quiet, record, subject
from txl_jax.generate import GenerateConfig, generation_model, stream
from txl_jax.model.config import ModelConfig

PART = 32  # tokens of a repetition
COLUMNS = 4096  # of the matrix


def bytes_read(config: ModelConfig, params: Any) -> int:
    """Returns the bytes that a token reads: weights, and k, v and r of every layer.

    The weights that make r are not among them: r is made once.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    weights -= params["layers"]["attention"]["r"].nbytes
    row = config.n_head * config.d_head * config.memory_dtype.itemsize
    return int(weights + config.n_layer * (3 * config.mem_len + 1) * row)


def make_reader(size: int) -> Callable[[], Any]:
    """Returns a product that reads a matrix of so many bytes, in whole rows."""
    matrix = jnp.ones((math.ceil(size / 4 / COLUMNS), COLUMNS))
    vector = jnp.ones(COLUMNS)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(matrix, vector).block_until_ready()


def generate(
    given: argparse.Namespace, watch: quiet.Watch, mem_len: int
) -> dict[str, Any]:
    """Measures with a memory of mem_len tokens, full of a prompt."""
    config = subject.shrink(subject.ENWIK8) if given.tiny else subject.ENWIK8
    # The first part comes with the prompt; then the warm-up, then the repetitions.
    count = PART * (quiet.MOST_TURNS * given.repeats + 2)
    how = GenerateConfig(mem_len=mem_len, num_tokens=count, stream_every=PART)
    config = generation_model(config, how)
    params = subject.make_params(config)
    prompt_T = subject.zipf_text(config.vocab_size, mem_len + 1)
    parts = stream(config, params, [prompt_T], how)
    started = quiet.clock(lambda: next(parts))
    programs: dict[str, Callable[[], Any]] = {"ours": lambda: next(parts)}
    if peer.there():
        other = peer.Peer(config)
        programs["peer"] = lambda: other.call("generate", PART, how.top_k)
    size = bytes_read(config, params)
    programs["reader"] = quiet.times(PART, make_reader(size))
    timings = quiet.alternate(programs, given.repeats, watch)
    reader = timings.pop("reader")
    start = {"compile_seconds": round(started - timings["ours"].median, 2)}
    case = record.case(f"memory {mem_len}", PART, timings, ours=start)
    case["sides"]["bound"] = reader.describe(PART) | {
        "bytes_per_token": size,
        "gigabytes_per_second": round(size * PART / reader.median / 1e9, 2),
    }
    case["of_the_bound"] = round(reader.median / timings["ours"].median, 3)
    return case


def measure(given: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures with each memory."""
    cases = [generate(given, watch, mem_len) for mem_len in given.memories]
    return {"peer": peer.found(), "cases": cases}


def main() -> None:
    parser = record.make_parser(__doc__)
    parser.add_argument(
        "--memories", type=record.positive, nargs="+", default=[2100, 512]
    )
    record.run("generation", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
