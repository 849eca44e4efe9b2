"""How much faster a memory is than windows that are read anew (Table 9).

The time of one token, on the same model, tokens and device, three ways:

    cached   segments of L tokens, each read with a memory of W: what this project does
    naive    a window of W tokens for each token, as Al-Rfou et al. evaluate: all
             positions of all layers, all W x W scores with the later keys masked, and
             the softmax of all positions; one number of it is used
    fair     the same number with nothing computed in vain: scores up to the diagonal,
             in the last layer one query, and the softmax of one position

Attention length W, as in the paper: each token sees at least the W before it, or with
same_length exactly so many. The paper says neither the segment nor the batch.

Dims: B streams, or windows side by side, L segment, W attention length, M memory = W,
N layers, D model, H heads, A head, F feed-forward, R distances.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax import distributed
from txl_jax.data.streams import Streams
from txl_jax.errors import UserError, require
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model, make_steps
from txl_jax.evaluate.sliding import (
    last_nll,
    project_distances,
    whole_nll,
    window_model,
)
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import unstack
from txl_jax.preemption import stop
from txl_jax.report import plots
from txl_jax.report.writer import say, to_json
from txl_jax.roofline import distances, vocabulary_products
from txl_jax.sharding import MeshConfig, make_mesh, place_segments
from txl_jax.state import init_params

# Table 9: how many times slower Al-Rfou et al.'s evaluation is, by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
    """What is timed; clamp_len and same_length are those of eval."""

    attention_lens: tuple[int, ...] = (800, 1800, 2800, 3800)  # Table 9
    tgt_len: int = 512  # of a segment of the cached evaluation; enwik8's in training
    batch_size: int = 1  # streams, and windows read side by side
    rounds: int = 3  # in each, all three are timed in turn; medians are reported
    segments: int = 4  # of the cached evaluation in a round; one call of each window
    seed: int = 0  # of the tokens, and of fresh weights

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "speed", 1, "tgt_len", "batch_size", "rounds", "segments")
        require(self, "speed", 0, "seed")
        if not self.attention_lens or min(self.attention_lens) < 2:
            raise UserError(
                f"speed.attention_lens = {self.attention_lens} must be lengths of at "
                "least 2, such as 800,3800"
            )


class Flops(NamedTuple):
    """FLOPs of matrix products for one token; a multiplication and a sum are 2."""

    cached: float
    naive: float
    fair: float


def count_flops(config: ModelConfig, how: SpeedConfig, W: int) -> Flops:
    """Returns what each way computes for one token that it predicts.

    Of the cached and the fair way, scores up to the diagonal alone, since neither needs
    more. A distance that is not encoded apart (clamp_len) is not multiplied. What is
    made once for a text, or once for a batch and divides among it, is counted so.
    """
    B, L, N = how.batch_size, how.tgt_len, config.n_layer
    D, HA, F = config.d_model, config.n_head * config.d_head, config.d_inner
    projected, forward = 2 * D * HA, 4 * D * F  # of one position; one of q, k, v, o
    relative = config.position == "transformer_xl"

    def attended(keys: np.ndarray) -> float:
        """Scores by content and the sum of values, and scores by distance."""
        pairs = 2 * keys.sum()
        if relative or config.position.startswith("shaw"):
            pairs += np.minimum(keys, distances(config, W + L)).sum()
        return float(2 * HA * pairs)

    def head(read: int, predicted: int) -> float:
        """Embeddings of what is read, the softmax of what is predicted."""
        embedded = vocabulary_products(config, read).both / 2
        scored = vocabulary_products(config, predicted)
        return embedded + scored.both / 2 + scored.again

    seen = np.full(L, W) if config.same_length else W + 1 + np.arange(L)
    cached = N * (L * (4 * projected + forward) + attended(seen)) + head(L, L)
    window = 1 + np.arange(W)
    R = distances(config, W)
    made = R * projected / B if relative else 0.0  # r = W R of a layer
    layer = W * (4 * projected + forward)
    naive = N * (layer + attended(np.full(W, W)) + made) + head(W, W)
    last = 2 * (W + 1) * projected + forward + attended(window[-1:]) + made
    fair = (N - 1) * (layer + attended(window)) + last + head(W, 1)
    return Flops(cached / L, naive, fair)


class Programs(NamedTuple):
    """The three ways; each returns when it is done, and has been run before."""

    cached: Callable[[], None]  # one segment of every stream
    naive: Callable[[], None]  # one window of every stream
    fair: Callable[[], None]


def make_programs(
    model: ModelConfig,
    how: EvalConfig,
    speed: SpeedConfig,
    params: Any,
    mesh: Mesh,
    W: int,
) -> Programs:
    """Compiles the three ways of attention length W over one random text."""
    B, L = speed.batch_size, speed.tgt_len
    how = dataclasses.replace(
        how, streams=B, tgt_len=L, mem_len=W, ext_len=0, sliding_window=0
    )
    calls = speed.rounds * speed.segments + 2  # of which two come before the clock
    rng = np.random.default_rng(speed.seed)
    width = max(calls * L, W + 1)
    text_T = rng.integers(0, model.vocab_size, B * width + 1, dtype=np.int32)

    apart, empty, eval_step = make_steps(model, how, mesh)
    parts = apart(params)
    segments = iter(Streams(text_T, B, L).epoch())

    def read(memory: Any) -> Any:
        segment = place_segments(mesh, next(segments))
        return jax.block_until_ready(eval_step(parts, memory, segment))[0]

    # Full from here on: what is in the slots changes no time, only that they are seen.
    memory = read(empty(parts))
    memory = dataclasses.replace(memory, filled_B=jnp.full_like(memory.filled_B, W))

    def cached() -> None:
        nonlocal memory
        memory = read(memory)

    # Window b ends where stream b's first W tokens do.
    window_BT = text_T[:-1].reshape(B, width)[:, : W + 1]
    tokens_BW, targets_BW = window_BT[:, :-1], window_BT[:, 1:]
    dense = dataclasses.replace(window_model(model, how.clamp_len), kernel="xla")
    tiled = window_model(model, how.clamp_len)
    whole = jax.jit(lambda params, *text: whole_nll(dense, params, *text))
    last = jax.jit(lambda *arguments: last_nll(tiled, *arguments))

    @jax.jit
    def prepare(params: Any) -> tuple[Any, Any]:
        apart = unstack(params)
        return apart, project_distances(tiled, apart, W)

    prepared = prepare(params)

    def naive() -> Any:
        return jax.block_until_ready(whole(params, tokens_BW, targets_BW))

    def fair() -> Any:
        return jax.block_until_ready(last(*prepared, tokens_BW, targets_BW[:, -1]))

    found, expected = np.asarray(fair()), np.asarray(naive())[:, -1]
    if not np.allclose(found, expected, rtol=2e-2):
        raise AssertionError(f"the two windows disagree: {found}, {expected}")
    cached()
    return Programs(cached, naive, fair)


def measure(programs: Programs, how: SpeedConfig) -> dict[str, float]:
    """Returns the median seconds per token of each way, all timed in turn."""
    found: dict[str, list[float]] = {name: [] for name in Programs._fields}
    tokens = {"cached": how.batch_size * how.tgt_len}
    for _ in range(how.rounds):
        for name, program in programs._asdict().items():
            for _ in range(how.segments if name == "cached" else 1):
                started = time.perf_counter()
                program()
                seconds = time.perf_counter() - started
                found[name].append(seconds / tokens.get(name, how.batch_size))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def describe(
    model: ModelConfig, how: SpeedConfig, W: int, seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns a row of the table: Table 9's ratio for both windows, and predictions.

    A predicted ratio is that of the FLOPs; it comes true where both ways make as many
    in a second.
    """
    flops = count_flops(model, how, W)
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


def run(
    model: ModelConfig, how: EvalConfig, speed: SpeedConfig, params: Any, folder: Path
) -> dict[str, Any]:
    """Times every attention length; leaves a JSON file and a plot.

    One device serves, the first. params = None: fresh ones.
    """
    device = jax.local_devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    if params is None:
        key = jax.random.key(speed.seed)
        params = jax.jit(lambda: nn.unbox(init_params(model, key)))()
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for W in speed.attention_lens:
        read_with = evaluation_model(model, dataclasses.replace(how, mem_len=W))
        programs = make_programs(model, how, speed, params, mesh, W)
        rows.append(describe(read_with, speed, W, measure(programs, speed)))
        row = rows[-1]
        say(
            f"attention length {W:,}: {row['cached_seconds_per_token'] * 1e3:.3f} ms "
            f"per token; windows {row['ratio']:,.0f} times as long, at best "
            f"{row['fair_ratio']:,.0f} (FLOPs: {row['predicted_fair_ratio']:,.0f})"
            + (f"; paper {PAPER[W]:,}" if W in PAPER else "")
        )
        # After each length, since the next takes longer than all before it.
        result = keep(speed, device.device_kind, rows, folder)
        if stop.at_boundary():
            raise stop.end("while timing")
    return result


def keep(
    how: SpeedConfig, device_kind: str, rows: list[dict[str, Any]], folder: Path
) -> dict[str, Any]:
    """Returns the table so far; leaves it as JSON, and a plot."""
    result = {
        **dataclasses.asdict(how),
        "device_kind": device_kind,
        "segments_timed": how.rounds * how.segments,
        "windows_timed": how.rounds * how.batch_size,
        "rows": rows,
    }
    if distributed.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        result |= {"picture": f"{folder}/speed.png", "file": f"{folder}/speed.json"}
        plots.plot_speed(rows, Path(result["picture"]))
        Path(result["file"]).write_text(to_json(result, indent=2) + "\n", "utf-8")
    return result
