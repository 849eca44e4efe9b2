"""The mode `speed`: evaluation with a memory and with sliding windows (Table 9).

The time per token is measured in three ways on the same model, tokens and device:

    cached   segments of L tokens, each read with a memory of W tokens
    sliding  a window of W tokens for each token, as in Al-Rfou et al. (2018)
             (section 4.5): all positions of all layers, all W x W scores with later
             keys masked, and the softmax of all positions, although only the last
             result is used
    fair     the same result without unused work: scores up to the diagonal, one query
             in the last layer, and the softmax of one position

W is the paper's attention length: each token sees at least the W tokens before it, with
same_length exactly W. The paper gives neither the segment length nor the batch size.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.config import Config
from txl_jax.data.streams import Streams
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig, evaluation_model, parse_sweep
from txl_jax.evaluate.perplexity import make_reader
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.flops import positionwise_products, vocabulary_products
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
from txl_jax.model.positions import distances
from txl_jax.model.txl import TransformerXL
from txl_jax.report.log import say
from txl_jax.report.plots import empty, save
from txl_jax.runtime.programs import Program
from txl_jax.runtime.storage import Json
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.state import init_params
from txl_jax.workdir.folder import CONFIG
from txl_jax.workdir.load import load
from txl_jax.workdir.resolve import find_vocab
from txl_jax.workdir.staging import write_files

Way = Callable[[], Array]  # reads a few tokens
ROUNDS = 3  # their median is reported
SEGMENTS = 4  # cached segments timed per round; each kind of window is timed once
# Table 9: the slowdown of Al-Rfou et al.'s evaluation by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def measure_speed(config: Config, workdir: Path) -> Json:
    """Times every attention length on the first device, and writes after each one.

    The parameters come from the workdir's run, or are random if there is none.
    """
    started = time.perf_counter()
    lengths = attention_lens(config.eval.sweep)
    device = jax.local_devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    if (workdir / CONFIG).exists():
        loaded = load(workdir, config)
        config, params = loaded.config, loaded.params
    else:
        config = find_vocab(config)
        key = jax.random.key(0)
        params = jax.jit(lambda: nn.unbox(init_params(config.model, key)))()
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    B, L = config.eval.streams, config.eval.tgt_len
    rows: list[Json] = []
    result: Json = {
        "attention_lens": lengths,
        "batch_size": B,
        "tgt_len": L,
        "device_kind": device.device_kind,
        "segments_timed": ROUNDS * SEGMENTS,
        "windows_timed": ROUNDS * B,
        "rows": rows,
    }
    for W in lengths:
        timed = dataclasses.replace(
            config.eval, mem_len=W, ext_len=0, segments_per_step=1
        )
        seconds = measure(make_ways(config.model, timed, params, mesh), B, L)
        row = describe(evaluation_model(config.model, timed), B, L, seconds)
        say(
            f"attention length {W:,}: {row['cached_seconds_per_token'] * 1e3:.3f} ms "
            f"per token; windows are {row['ratio']:,.0f} times slower, at best "
            f"{row['fair_ratio']:,.0f} (by FLOPs {row['predicted_fair_ratio']:,.0f})"
        )
        rows.append(row)
        result["seconds"] = time.perf_counter() - started
        files = write_files(workdir / "speed", result, plot_speed)
    return result | files


def plot_speed(result: Json, path: Path) -> None:
    """Draws the slowdown of windows against the attention length, beside Table 9."""
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    for key, label, style, color in (
        ("ratio", "window, naive", "o-", "tab:red"),
        ("predicted_ratio", "its FLOPs", "--", "tab:red"),
        ("fair_ratio", "window, only needed work", "o-", "tab:blue"),
        ("predicted_fair_ratio", "its FLOPs", "--", "tab:blue"),
        ("paper_ratio", "paper, Table 9 (another model and device)", "D:", "gray"),
    ):
        pairs = [(x["attention_len"], x[key]) for x in result["rows"] if key in x]
        points_X2 = np.array(pairs, float).reshape(-1, 2)
        axes.plot(*points_X2.T, style, color=color, markersize=5, label=label)
    ticks = [row["attention_len"] for row in result["rows"]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="attention length", ylabel="time per token, cached = 1")
    axes.set_ylim(bottom=0)
    save(figure, path)


def attention_lens(sweep: str) -> tuple[int, ...]:
    """Returns the attention lengths of eval.sweep; "" means Table 9's."""
    if not sweep:
        return tuple(PAPER)
    field, lengths = parse_sweep(sweep)
    if field != "mem_len" or min(lengths) < 2:
        raise UserError(
            f"eval.sweep = {sweep!r} must be attention lengths of at least 2 in mode "
            "speed, such as mem_len=800,3800"
        )
    return tuple(map(int, lengths))


def count_flops(config: ModelConfig, B: int, L: int, W: int) -> dict[str, float]:
    """Returns the FLOPs of each way's matrix products for one predicted token.

    Distances that clamp_len maps to the same encoding count once. Work done once per
    text is not counted; work done once per batch is divided by the batch size.
    """
    N, D = config.n_layer, config.d_model
    HA = config.n_head * config.d_head
    projected = 2 * D * HA  # per position, for each of q, k, v, o
    forward = positionwise_products(config)
    relative = config.position == "transformer_xl"

    def attended(keys: np.ndarray) -> float:
        """Returns the FLOPs of content scores, value sums and position scores."""
        pairs = 2 * keys.sum()
        if relative or config.position.startswith("shaw"):
            pairs += np.minimum(keys, distances(config, W + L)).sum()
        return float(2 * HA * pairs)

    def head(read: int, predicted: int) -> float:
        """Returns the FLOPs of embedding `read` and scoring `predicted` tokens."""
        embedded, _ = vocabulary_products(config, read)
        both, scored = vocabulary_products(config, predicted)
        return float(embedded / 2 + both / 2 + scored)

    seen = np.full(L, W) if config.same_length else W + 1 + np.arange(L)
    cached = N * (L * (4 * projected + forward) + attended(seen)) + head(L, L)
    window = 1 + np.arange(W)
    R = distances(config, W)
    shared = R * projected / B if relative else 0.0  # r = W R of a layer
    layer = W * (4 * projected + forward)
    sliding = N * (layer + attended(np.full(W, W)) + shared) + head(W, W)
    last = 2 * (W + 1) * projected + forward + attended(window[-1:]) + shared
    fair = (N - 1) * (layer + attended(window)) + last + head(W, 1)
    return {"cached": cached / L, "sliding": sliding, "fair": fair}


def window_model(config: ModelConfig, clamp_len: int) -> ModelConfig:
    """Returns the model without memory; "auto" skips tiles of future keys."""
    on_tpu = jax.default_backend() == "tpu" and config.position == "transformer_xl"
    kernel = "tpu" if on_tpu else "chunked"
    return dataclasses.replace(
        config,
        mem_len=0,
        clamp_len=clamp_len,
        same_length=False,
        initial_memory="empty",
        kernel=kernel if config.kernel == "auto" else config.kernel,
    )


def whole_nll(
    config: ModelConfig, params: Params, tokens_BW: Array, targets_BW: Array
) -> Array:
    """Returns the nll of every position of windows, nll_BW; `params` are stacked."""
    memory = Memory.empty(config, tokens_BW.shape[0])
    nll_BW, _ = TransformerXL(config).apply(
        {"params": params}, tokens_BW, targets_BW, memory, method="nll"
    )
    return nll_BW


def last_nll(
    config: ModelConfig,
    params: Params,
    memory: KeyValueMemory,
    tokens_BW: Array,
    target_B: Array,
) -> Array:
    """Returns the nll of the token after each window, nll_B; `params` are laid out.

    The last token reads the others from a memory, initially `window_memory`, so the
    compiler removes the others' queries in the last layer.
    """
    model, before = FixedTransformerXL(config, params), tokens_BW.shape[1] - 1
    _, after = model(tokens_BW[:, :-1], memory)
    start_B, filled_B = jnp.ones_like(target_B), jnp.full_like(target_B, before)
    layers = tuple(
        dataclasses.replace(layer, start_B=start_B) for layer in after.layers
    )
    memory = KeyValueMemory(layers, filled_B, before)
    nll_B1, _ = model.nll(tokens_BW[:, -1:], target_B[:, None], memory)
    return nll_B1[:, 0]


def window_memory(
    config: ModelConfig, params: Params, B: int, W: int
) -> KeyValueMemory:
    """Returns an empty memory for a window's first W - 1 tokens and one earlier."""
    return KeyValueMemory.empty(config, params, B, W - 1, mem_len=1)


def make_ways(
    model_config: ModelConfig, config: EvalConfig, params: Params, mesh: Mesh
) -> dict[str, Way]:
    """Compiles the three ways over a random text, with W = config.mem_len."""
    if model_config.fast_weights:
        raise UserError(
            "model.fast_weights: --mode=speed supports only the paper's memory"
        )
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
    whole = Program("whole windows", functools.partial(whole_nll, dense))
    last = Program("windows", functools.partial(last_nll, tiled))
    reader = make_reader(model_config, config, mesh)
    laid_out = reader.lay_out(params)
    memory = jax.jit(lambda params: window_memory(tiled, params, B, W))(laid_out)
    outputs = reader.outputs(laid_out, Streams(text_T, B, L).epoch())
    for _ in range(filling):
        next(outputs)
    ways: dict[str, Way] = {
        "cached": lambda: next(outputs),
        "sliding": lambda: whole(params, tokens_BW, targets_BW),
        "fair": lambda: last(laid_out, memory, tokens_BW, targets_BW[:, -1]),
    }
    for name in ("sliding", "fair"):
        jax.block_until_ready(ways[name]())  # compiles
    return ways


def measure(ways: dict[str, Way], B: int, L: int) -> dict[str, float]:
    """Returns the median seconds per token of each way, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            calls, tokens = (SEGMENTS, B * L) if name == "cached" else (1, B)
            for _ in range(calls):
                started = time.perf_counter()
                jax.block_until_ready(way())
                seconds[name].append((time.perf_counter() - started) / tokens)
    return {name: statistics.median(each) for name, each in seconds.items()}


def describe(config: ModelConfig, B: int, L: int, seconds: dict[str, float]) -> Json:
    """Returns a row: measured and predicted ratios (of FLOPs) for both windows."""
    W = config.mem_len
    flops = count_flops(config, B, L, W)
    row: Json = {"attention_len": W}
    for way in flops:
        row[f"{way}_seconds_per_token"] = seconds[way]
    for ratio, way in (("ratio", "sliding"), ("fair_ratio", "fair")):
        row[ratio] = seconds[way] / seconds["cached"]
        row[f"predicted_{ratio}"] = flops[way] / flops["cached"]
    return row | ({"paper_ratio": PAPER[W]} if W in PAPER else {})
