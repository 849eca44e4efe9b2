"""Sliding-window evaluation, as Al-Rfou et al. (2018) evaluate (section 4.5, Table 9).

Every token is predicted from a window of the W tokens before it, read from nothing:
the whole window is computed, its last position alone predicts, and the window moves on
by one. The first W tokens have shorter windows, which begin with the text: one pass
over the first window has all their predictions.

Dims: B windows, W tokens of a window, N layers, D model, H heads, A head.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from txl_jax import metrics
from txl_jax.kernels.xla import heads_first
from txl_jax.model.attention import Attention
from txl_jax.model.block import FeedForward
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory, KeyValues, project, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES, Distances
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import check_streams, shardings


def window_model(config: ModelConfig, clamp_len: int, kernel: str = "") -> ModelConfig:
    """Returns the model as it reads windows: with nothing to remember.

    kernel: of the attention, where the config leaves the choice; "" = see
    `window_kernel`.
    """
    chosen = kernel or window_kernel()
    return dataclasses.replace(
        config,
        mem_len=0,
        clamp_len=clamp_len,
        same_length=False,
        initial_memory="empty",
        kernel=chosen if config.kernel == "auto" else config.kernel,
    )


def window_kernel() -> str:
    """Returns the kernel that skips the keys after each query, tile by tile."""
    return "tpu" if jax.default_backend() == "tpu" else "chunked"


def whole_nll(
    config: ModelConfig, params: Any, tokens_BW: Array, targets_BW: Array
) -> Array:
    """Returns the nll of every position of windows, nll_BW in nats.

    `params` as they are stored. This is the model as it stands, told nothing of
    windows: all positions of all layers, and the softmax of all positions.
    """
    memory = Memory.empty(config, tokens_BW.shape[0])
    nll_BW, _ = TransformerXL(config).apply(
        {"params": params}, tokens_BW, targets_BW, memory, method="nll"
    )
    return nll_BW


def project_distances(
    config: ModelConfig, params: Any, W: int
) -> tuple[Distances, ...]:
    """Returns what each layer's scores need of W distances: made once for a text.

    `params` are unstacked.
    """
    kept = KeyValueMemory.of(config, params, Memory.empty(config, 1), W)
    return tuple(layer.distances for layer in kept.layers)


def last_nll(
    config: ModelConfig,
    params: Any,
    distances: tuple[Distances, ...],
    tokens_BW: Array,
    target_B: Array,
) -> Array:
    """Returns the nll of the token after each window, nll_B in nats.

    `params` are unstacked, `distances` theirs. The same numbers as the last of
    `whole_nll`, with nothing computed that they do not need: the last layer makes keys
    and values of all positions, and the rest of the last alone, which alone meets the
    softmax. Scores of later keys are skipped where config.kernel skips them.
    """
    B, W = tokens_BW.shape
    N = config.n_layer
    model = TransformerXL(config, stacked=False).bind({"params": params})
    scheme = SCHEMES[config.position]
    h_BWD = model.embedding.embed(tokens_BW)
    if scheme.embeddings:
        h_BWD += scheme.embeddings(config, W).astype(h_BWD.dtype)
    oldest_BW = jnp.zeros((B, W), jnp.int32)
    nothing_HBWA = jnp.zeros((config.n_head, B, W, config.d_head), h_BWD.dtype)
    zero_HA = nothing_HBWA[:, 0, 0]
    for n in range(N - 1):
        layer = KeyValues(
            *(nothing_HBWA, nothing_HBWA, distances[n]),
            *((zero_HA, zero_HA), oldest_BW[:, 0]),
        )
        h_BWD, _ = model.layers[n](h_BWD, layer, {}, None, oldest_BW)
    own = params[f"layers_{N - 1}"]
    if "places" in own:
        h_BWD += own["places"][:W].astype(h_BWD.dtype)
    # What is before the last position is read as a memory is: no queries of it.
    last = (own["attention"], distances[N - 1])
    h_B1D = _attend_last(config, *last, h_BWD, oldest_BW[:, :1])
    feed_forward = {"params": own["feed_forward"]}
    h_B1D = FeedForward(config, stacked=False).apply(feed_forward, h_B1D)  # type: ignore
    return model.embedding.nll(h_B1D, target_B[:, None])[:, 0]


def _attend_last(
    config: ModelConfig,
    attention: Any,
    distances: Distances,
    h_BWD: Array,
    oldest_B1: Array,
) -> Array:
    """Returns the last position after the attention of the last layer, h_B1D."""
    before = project(config, attention, h_BWD[:, :-1])
    slot = ((0, 0), (0, 1), (0, 0), (0, 0))  # for the last one's own key and value
    k_HBWA, v_HBWA = (heads_first(jnp.pad(x_BMHA, slot)) for x_BMHA in before)
    zero_HA = jnp.zeros_like(k_HBWA[:, 0, 0])
    start_B = jnp.zeros_like(oldest_B1[:, 0])
    layer = KeyValues(k_HBWA, v_HBWA, distances, (zero_HA, zero_HA), start_B)
    one_query = dataclasses.replace(config, kernel="xla")
    h_B1D, _ = Attention(one_query).apply(
        {"params": attention}, h_BWD[:, -1:], layer, {}, None, oldest_B1
    )
    return h_B1D


def windows(
    tokens: np.ndarray, W: int, B: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens_BW, target_B, weight_B) of every full window but the first.

    The last batch is filled up with windows of weight 0.
    """
    starts = np.arange(1, len(tokens) - W)
    if not len(starts):
        return
    whole = np.lib.stride_tricks.sliding_window_view(tokens, W)
    for begin in range(0, len(starts), B):
        start_B = starts[begin : begin + B]
        weight_B = (np.arange(B) < len(start_B)).astype(np.float32)
        start_B = np.pad(start_B, (0, B - len(start_B)), mode="edge")
        tokens_BW, target_B = whole[start_B], tokens[start_B + W]
        yield tokens_BW.astype(np.int32), target_B.astype(np.int32), weight_B


def make_sliding(
    config: ModelConfig, how: Any, mesh: Mesh
) -> Callable[[Any, np.ndarray, Callable[[int, int], None]], dict[str, Any]]:
    """Returns evaluate(params, tokens, progress), as `perplexity.make_evaluate` does.

    `how` is an EvalConfig: windows of how.sliding_window tokens, how.streams of them
    side by side, which changes nothing in the result. cold_tokens: those with shorter
    windows; windows: the full ones.
    """
    check_streams(mesh, how.streams, "eval.streams")
    W, B = how.sliding_window, how.streams
    config = window_model(config, how.clamp_len)
    # One window does not divide over a mesh; the compiler splits this kernel itself.
    first_config = dataclasses.replace(config, kernel="xla")
    places = shardings(mesh, PartitionSpec(*"BL"))

    @jax.jit
    def prepare(params: Any) -> tuple[Any, Any]:
        apart = unstack(params)
        return apart, project_distances(config, apart, W)

    @jax.jit
    def first(params: Any, tokens_1W: Array, targets_1W: Array) -> Array:
        return jnp.sum(whole_nll(first_config, params, tokens_1W, targets_1W))

    @jax.jit
    def score(
        prepared: tuple[Any, Any], tokens_BW: Array, target_B: Array, weight_B: Array
    ) -> Array:
        tokens_BW = jax.lax.with_sharding_constraint(tokens_BW, places)
        nll_B = last_nll(config, *prepared, tokens_BW, target_B)
        return jnp.sum(nll_B * weight_B)

    def evaluate(
        params: Any, tokens: np.ndarray, progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = np.asarray(how.cut(tokens))
        scored = len(tokens) - 1
        cold = min(W, scored)
        total = -(-(scored - cold) // B) + 1
        text_1T = tokens[None, : cold + 1].astype(np.int32)
        sums = [first(params, text_1T[:, :-1], text_1T[:, 1:])]
        progress(1, total)
        prepared = prepare(params) if scored > cold else None
        for number, batch in enumerate(windows(tokens, W, B)):
            sums.append(score(prepared, *batch))
            if number % 8 == 7:
                jax.block_until_ready(sums[-1])  # progress is of what is done
            progress(number + 2, total)
        nll = float(np.sum(jax.device_get(sums), dtype=np.float64)) / scored
        seconds = time.perf_counter() - started
        return {
            "tokens": scored,
            "nll": nll,
            "ppl": metrics.perplexity(nll),
            "bpc": metrics.bits(nll),
            "windows": scored - cold + 1,
            "cold_tokens": cold - 1,
            "seconds": seconds,
            "tokens_per_second": scored / seconds,
            # Whatever the config says of memories has no part in this.
            **{"tgt_len": 1, "mem_len": 0, "ext_len": 0},
            **{"same_length": False, "warm_start": False},
        }

    return evaluate
