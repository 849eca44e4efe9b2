"""The speed of evaluation with a memory and with sliding windows (Table 9).

The time per token is measured in three ways on the same model, tokens and device:

    cached   segments of L tokens, each read with a memory of W tokens
    naive    a window of W tokens for each token, as Al-Rfou et al. evaluate: all
             positions of all layers, all W x W scores with later keys masked, and the
             softmax of all positions, although only the last result is used
    fair     the same result without unused work: scores up to the diagonal, one query
             in the last layer, and the softmax of one position

W is the paper's attention length: each token sees at least the W tokens before it, with
same_length exactly W. The paper gives neither the segment length nor the batch size.

Dims: B streams or windows, L segment, W attention length, M memory = W, N layers, D
model, H heads, A head, F feed-forward, R distances.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.aot.roofline import distances, vocabulary_products
from txl_jax.data.streams import Streams
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig, parse_sweep
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.evaluate.reader import empty_memory
from txl_jax.evaluate.sliding import last_nll, whole_nll, window_model
from txl_jax.model.config import ModelConfig

ROUNDS = 3  # the median of which is reported
SEGMENTS = 4  # cached segments timed per round; each kind of window is timed once
# Table 9: the slowdown of Al-Rfou et al.'s evaluation by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def attention_lens(sweep: str) -> tuple[int, ...]:
    """Returns the attention lengths of eval.sweep; "" gives those of Table 9."""
    if not sweep:
        return tuple(PAPER)
    field, lengths = parse_sweep(sweep)
    if field != "mem_len" or min(lengths) < 2:
        raise UserError(
            f"eval.sweep = {sweep!r} must be attention lengths of at least 2 in mode "
            "speed, such as mem_len=800,3800"
        )
    return lengths


class Flops(NamedTuple):
    """FLOPs of matrix products for one token; a multiply-add counts as 2."""

    cached: float
    naive: float
    fair: float


def count_flops(config: ModelConfig, B: int, L: int, W: int) -> Flops:
    """Returns the FLOPs of each way for one predicted token.

    `cached` and `fair` need only the scores up to the diagonal. Distances that
    clamp_len maps to the same encoding count once. Work done once per text is not
    counted; work done once per batch is divided by the batch size.
    """
    N, D, F = config.n_layer, config.d_model, config.d_inner
    HA = config.n_head * config.d_head
    projected, forward = 2 * D * HA, 4 * D * F  # per position, for each of q, k, v, o
    relative = config.position == "transformer_xl"

    def attended(keys: np.ndarray) -> float:
        """Returns the FLOPs of content scores, value sums and position scores."""
        pairs = 2 * keys.sum()
        if relative or config.position.startswith("shaw"):
            pairs += np.minimum(keys, distances(config, W + L)).sum()
        return float(2 * HA * pairs)

    def head(read: int, predicted: int) -> float:
        """Returns the FLOPs of embedding `read` and scoring `predicted` tokens."""
        embedded, *_ = vocabulary_products(config, read)
        both, _, scored = vocabulary_products(config, predicted)
        return float(embedded / 2 + both / 2 + scored)

    seen = np.full(L, W) if config.same_length else W + 1 + np.arange(L)
    cached = N * (L * (4 * projected + forward) + attended(seen)) + head(L, L)
    window = 1 + np.arange(W)
    R = distances(config, W)
    shared = R * projected / B if relative else 0.0  # r = W R of a layer
    layer = W * (4 * projected + forward)
    naive = N * (layer + attended(np.full(W, W)) + shared) + head(W, W)
    last = 2 * (W + 1) * projected + forward + attended(window[-1:]) + shared
    fair = (N - 1) * (layer + attended(window)) + last + head(W, 1)
    return Flops(cached / L, naive, fair)


class Programs(NamedTuple):
    """The three ways, compiled; each call blocks until its result is ready."""

    cached: Callable[[], Any]  # the next segment of every stream, with a full memory
    naive: Callable[[], Any]  # one window of every stream: the nll of all its tokens
    fair: Callable[[], Any]  # the same window: the nll of its last token


def make_programs(
    model_config: ModelConfig, config: EvalConfig, params: Any, mesh: Mesh
) -> Programs:
    """Compiles the three ways over a random text, with W = config.mem_len."""
    B, L, W = config.streams, config.tgt_len, config.mem_len
    filling = -(-W // L)  # segments that fill the memory
    width = (filling + ROUNDS * SEGMENTS) * L
    rng = np.random.default_rng(0)
    text_T = rng.integers(0, model_config.vocab_size, B * width + 1, dtype=np.int32)
    # Window b covers the first W tokens of stream b.
    window_BT = text_T[:-1].reshape(B, width)[:, : W + 1]
    tokens_BW, targets_BW = window_BT[:, :-1], window_BT[:, 1:]
    tiled = window_model(model_config, config.clamp_len)
    dense = dataclasses.replace(tiled, kernel="xla")
    whole = jax.jit(lambda *args: whole_nll(dense, *args))
    last = jax.jit(lambda *args: last_nll(tiled, *args))
    reader = make_reader(model_config, config, mesh)
    own = reader.unstack(params)
    layers = jax.jit(lambda params: empty_memory(tiled, params, 1, W).layers)(own)
    outputs = reader.outputs(own, Streams(text_T, B, L).epoch())
    for _ in range(filling):
        next(outputs)
    programs = Programs(
        lambda: jax.block_until_ready(next(outputs)),
        lambda: jax.block_until_ready(whole(params, tokens_BW, targets_BW)),
        lambda: jax.block_until_ready(last(own, layers, tokens_BW, targets_BW[:, -1])),
    )
    for compile_window in programs[1:]:
        compile_window()
    return programs


def measure(programs: Programs, B: int, L: int) -> dict[str, float]:
    """Returns the median seconds per token of each way, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in Programs._fields}
    for _ in range(ROUNDS):
        for name, program in programs._asdict().items():
            calls, tokens = (SEGMENTS, B * L) if name == "cached" else (1, B)
            for _ in range(calls):
                started = time.perf_counter()
                program()
                seconds[name].append((time.perf_counter() - started) / tokens)
    return {name: statistics.median(each) for name, each in seconds.items()}


def describe(
    config: ModelConfig, B: int, L: int, seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns a row of the table: measured and predicted ratios for both windows.

    W is the model's mem_len. A predicted ratio is a ratio of FLOPs, which the measured
    ratio equals if both ways have the same throughput in FLOPs per second.
    """
    W = config.mem_len
    flops = count_flops(config, B, L, W)._asdict()
    row: dict[str, Any] = {"attention_len": W}
    for name, way in (("cached", "cached"), ("sliding", "naive"), ("fair", "fair")):
        row[f"{name}_seconds_per_token"] = seconds[way]
        row[f"{name}_gflops"] = flops[way] / seconds[way] / 1e9
    for ratio, way in (("ratio", "naive"), ("fair_ratio", "fair")):
        row[ratio] = seconds[way] / seconds["cached"]
        row[f"predicted_{ratio}"] = flops[way] / flops["cached"]
    return row | ({"paper_ratio": PAPER[W]} if W in PAPER else {})
