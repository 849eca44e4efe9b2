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
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.aot.roofline import distances, vocabulary_products
from txl_jax.data.streams import Streams
from txl_jax.evaluate.options import EvalConfig, SpeedConfig
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.evaluate.sliding import (
    last_nll,
    prepare,
    whole_nll,
    window_model,
)
from txl_jax.model.config import ModelConfig
from txl_jax.sharding import place_segments

SEGMENTS = 4  # cached segments timed per round; each kind of window is timed once
# Table 9: the slowdown of Al-Rfou et al.'s evaluation by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


class Flops(NamedTuple):
    """FLOPs of matrix products for one token; a multiply-add counts as 2."""

    cached: float
    naive: float
    fair: float


def count_flops(config: ModelConfig, speed: SpeedConfig, W: int) -> Flops:
    """Returns the FLOPs of each way for one predicted token.

    `cached` and `fair` need only the scores up to the diagonal. Distances that
    clamp_len maps to the same encoding count once. Work done once per text is not
    counted; work done once per batch is divided by the batch size.
    """
    B, L, N = speed.batch_size, speed.tgt_len, config.n_layer
    D, HA, F = config.d_model, config.n_head * config.d_head, config.d_inner
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
        embedded = vocabulary_products(config, read).both / 2
        scored = vocabulary_products(config, predicted)
        return embedded + scored.both / 2 + scored.again

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

    cached: Callable[[], Any]  # one segment of every stream
    naive: Callable[[], Any]  # one window of every stream
    fair: Callable[[], Any]


def make_programs(
    model_config: ModelConfig,
    config: EvalConfig,
    speed: SpeedConfig,
    params: Any,
    mesh: Mesh,
    W: int,
) -> Programs:
    """Compiles the three ways with attention length W, over a random text."""
    B, L = speed.batch_size, speed.tgt_len
    calls = speed.rounds * SEGMENTS + 2  # two are not timed
    width = max(calls * L, W + 1)
    rng = np.random.default_rng(0)
    text_T = rng.integers(0, model_config.vocab_size, B * width + 1, dtype=np.int32)
    config = dataclasses.replace(
        config, streams=B, tgt_len=L, mem_len=W, ext_len=0, sliding_window=0
    )
    cached = make_cached(model_config, config, params, mesh, text_T)
    # Window b covers the first W tokens of stream b.
    window_BT = text_T[:-1].reshape(B, width)[:, : W + 1]
    tiled = window_model(model_config, config.clamp_len)
    naive, fair = make_windows(tiled, params, window_BT)
    actual, expected = np.asarray(fair()), np.asarray(naive())[:, -1]
    if not np.allclose(actual, expected, rtol=2e-2):
        raise AssertionError(
            f"the naive and the fair window disagree: {expected}, {actual}"
        )
    cached()
    return Programs(cached, naive, fair)


def make_cached(
    model_config: ModelConfig,
    config: EvalConfig,
    params: Any,
    mesh: Mesh,
    text_T: np.ndarray,
) -> Callable[[], None]:
    """Returns a function that reads the text's next segment with a full memory."""
    reader = make_reader(model_config, config, mesh)
    params = reader.unstack(params)
    segments = iter(Streams(text_T, config.streams, config.tgt_len).epoch())

    def read(memory: Any) -> Any:
        segment = place_segments(mesh, next(segments))
        return jax.block_until_ready(reader.step(params, memory, segment))[0]

    # The time depends on the number of visible slots, not on their contents.
    memory = read(reader.empty(params))
    full_B = jnp.full_like(memory.filled_B, config.mem_len)
    memory = dataclasses.replace(memory, filled_B=full_B)

    def cached() -> None:
        nonlocal memory
        memory = read(memory)

    return cached


def make_windows(
    tiled: ModelConfig, params: Any, window_BT: np.ndarray
) -> tuple[Callable[[], Array], Callable[[], Array]]:
    """Returns (naive, fair): the nll of all tokens of each window, or of the last."""
    tokens_BW, targets_BW = window_BT[:, :-1], window_BT[:, 1:]
    dense = dataclasses.replace(tiled, kernel="xla")
    whole = jax.jit(lambda params, *text: whole_nll(dense, params, *text))
    last = jax.jit(lambda *args: last_nll(tiled, *args))

    W = tokens_BW.shape[1]
    prepared = jax.jit(lambda params: prepare(tiled, params, W))(params)

    def naive() -> Array:
        return jax.block_until_ready(whole(params, tokens_BW, targets_BW))

    def fair() -> Array:
        return jax.block_until_ready(last(prepared, tokens_BW, targets_BW[:, -1]))

    return naive, fair


def measure(programs: Programs, speed: SpeedConfig) -> dict[str, float]:
    """Returns the median seconds per token of each way, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in Programs._fields}
    tokens = {"cached": speed.batch_size * speed.tgt_len}
    for _ in range(speed.rounds):
        for name, program in programs._asdict().items():
            for _ in range(SEGMENTS if name == "cached" else 1):
                started = time.perf_counter()
                program()
                spent = time.perf_counter() - started
                seconds[name].append(spent / tokens.get(name, speed.batch_size))
    return {name: statistics.median(each) for name, each in seconds.items()}


def describe(
    config: ModelConfig, speed: SpeedConfig, W: int, seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns a row of the table: measured and predicted ratios for both windows.

    A predicted ratio is a ratio of FLOPs, which the measured ratio equals if both ways
    have the same throughput in FLOPs per second.
    """
    flops = count_flops(config, speed, W)
    fair_ratio = seconds["fair"] / seconds["cached"]
    row = {
        "attention_len": W,
        "cached_seconds_per_token": seconds["cached"],
        "sliding_seconds_per_token": seconds["naive"],
        "ratio": seconds["naive"] / seconds["cached"],
        "fair_seconds_per_token": seconds["fair"],
        "fair_ratio": fair_ratio,
        "predicted_ratio": flops.naive / flops.cached,
        "predicted_fair_ratio": flops.fair / flops.cached,
        "fair_ratio_of_predicted": fair_ratio * flops.cached / flops.fair,
        "cached_gflops": flops.cached / seconds["cached"] / 1e9,
        "sliding_gflops": flops.naive / seconds["naive"] / 1e9,
        "fair_gflops": flops.fair / seconds["fair"] / 1e9,
    }
    return row | ({"paper_ratio": PAPER[W]} if W in PAPER else {})
