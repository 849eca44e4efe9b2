"""Sliding-window evaluation, as in Al-Rfou et al. (2018) (section 4.5, Table 9).

Every token is predicted from the window of the W tokens before it, without a memory.
The whole window is computed, only its last position predicts, and the window moves by
one token. The windows of the first W tokens are shorter and share the start of the
text, so one pass over the first full window predicts them all.

Dims: B windows, W tokens of a window, N layers, D model, H heads, A head.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import Evaluate, Progress, summarize
from txl_jax.evaluate.reader import empty_memory
from txl_jax.kernels.xla import heads_first
from txl_jax.model.block import FeedForward
from txl_jax.model.config import ModelConfig
from txl_jax.model.decoder import Decoder, DecoderAttention, unstack
from txl_jax.model.key_values import KeyValues, project
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import check_streams, shardings


class Prepared(NamedTuple):
    """Parameters and distances, which all windows share."""

    params: Any  # unstacked
    layers: tuple[KeyValues, ...]  # each layer's W distances, without keys


def window_model(config: ModelConfig, clamp_len: int) -> ModelConfig:
    """Returns the model without memory, for windows.

    kernel = "auto" becomes a kernel that skips tiles of future keys.
    """
    kernel = "tpu" if jax.default_backend() == "tpu" else "chunked"
    return dataclasses.replace(
        config,
        mem_len=0,
        clamp_len=clamp_len,
        same_length=False,
        initial_memory="empty",
        kernel=kernel if config.kernel == "auto" else config.kernel,
    )


def whole_nll(
    config: ModelConfig, params: Any, tokens_BW: Array, targets_BW: Array
) -> Array:
    """Returns the nll of every position of windows, nll_BW in nats.

    This is the model's ordinary forward pass, with all layers and the softmax at all
    positions. `params` are stacked.
    """
    memory = Memory.empty(config, tokens_BW.shape[0])
    nll_BW, _ = TransformerXL(config).apply(
        {"params": params}, tokens_BW, targets_BW, memory, method="nll"
    )
    return nll_BW


def prepare(config: ModelConfig, params: Any, W: int) -> Prepared:
    """Computes once per text what all windows of W tokens share."""
    params = unstack(params)
    return Prepared(params, empty_memory(config, params, 1, W).layers)


def last_nll(
    config: ModelConfig, prepared: Prepared, tokens_BW: Array, target_B: Array
) -> Array:
    """Returns the nll of the token after each window, nll_B in nats.

    The result equals the last column of `whole_nll`, without unused computation. The
    last layer computes keys and values at all positions, and everything else, like the
    softmax, at the last position only. Scores of future keys are skipped if
    config.kernel skips them.
    """
    params = prepared.params
    B, W = tokens_BW.shape
    model = Decoder(config).bind({"params": params})
    scheme = SCHEMES[config.position]
    h_BWD = model.embedding.embed(tokens_BW)
    if scheme.embeddings:
        h_BWD += scheme.embeddings(config, W).astype(h_BWD.dtype)
    oldest_BW = jnp.zeros((B, W), jnp.int32)
    zeros_HBWA = jnp.zeros((config.n_head, B, W, config.d_head), h_BWD.dtype)
    *lower, last = (
        layer._replace(k_HBKA=zeros_HBWA, v_HBKA=zeros_HBWA, start_B=oldest_BW[:, 0])
        for layer in prepared.layers
    )
    for n, layer in enumerate(lower):
        h_BWD, _ = model.layers[n](h_BWD, layer, oldest_BW)
    own = params[f"layers_{len(lower)}"]
    if "places" in own:
        h_BWD += own["places"][:W].astype(h_BWD.dtype)
    # The earlier positions act as a memory, which has no queries. The padding is the
    # slot of the last position's own key and value.
    slot = ((0, 0), (0, 1), (0, 0), (0, 0))
    k_HBWA, v_HBWA = (
        heads_first(jnp.pad(x_BMHA, slot))
        for x_BMHA in project(config, own["attention"], h_BWD[:, :-1])
    )
    h_B1D, _ = DecoderAttention(dataclasses.replace(config, kernel="xla")).apply(
        {"params": own["attention"]},
        *(h_BWD[:, -1:], last._replace(k_HBKA=k_HBWA, v_HBKA=v_HBWA)),
        oldest_BW[:, :1],
    )
    feed_forward = {"params": own["feed_forward"]}
    hidden_B1D: Any = FeedForward(config, "DF").apply(feed_forward, h_B1D)
    return model.embedding.nll(hidden_B1D, target_B[:, None])[:, 0]


def windows(
    tokens: np.ndarray, W: int, B: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens_BW, target_B, weight_B) of every full window but the first.

    The last batch is completed with windows of weight 0.
    """
    starts = np.arange(1, len(tokens) - W)
    if not len(starts):
        return
    whole = np.lib.stride_tricks.sliding_window_view(tokens, W)
    for first in range(0, len(starts), B):
        start_B = starts[first : first + B]
        weight_B = (np.arange(B) < len(start_B)).astype(np.float32)
        start_B = np.pad(start_B, (0, B - len(start_B)), mode="edge")
        tokens_BW, target_B = whole[start_B], tokens[start_B + W]
        yield tokens_BW.astype(np.int32), target_B.astype(np.int32), weight_B


def make_sliding(model_config: ModelConfig, config: EvalConfig, mesh: Mesh) -> Evaluate:
    """Returns evaluate(params, tokens, progress), as `perplexity.make_evaluate` does.

    config.streams windows of config.sliding_window tokens are read in parallel, which
    does not change the result. cold_tokens counts the tokens with shorter windows,
    windows the full ones.
    """
    check_streams(mesh, config.streams, "eval.streams")
    W, B = config.sliding_window, config.streams
    model_config = window_model(model_config, config.clamp_len)
    # A single window does not divide over a mesh, but the compiler can split `xla`.
    first_config = dataclasses.replace(model_config, kernel="xla")
    places = shardings(mesh, PartitionSpec(*"BL"))

    @jax.jit
    def make_ready(params: Any) -> Prepared:
        return prepare(model_config, params, W)

    @jax.jit
    def first(params: Any, tokens_1W: Array, targets_1W: Array) -> Array:
        return jnp.sum(whole_nll(first_config, params, tokens_1W, targets_1W))

    @jax.jit
    def score(
        prepared: Prepared, tokens_BW: Array, target_B: Array, weight_B: Array
    ) -> Array:
        tokens_BW = jax.lax.with_sharding_constraint(tokens_BW, places)
        nll_B = last_nll(model_config, prepared, tokens_BW, target_B)
        return jnp.sum(nll_B * weight_B)

    def evaluate(params: Any, tokens: np.ndarray, progress: Progress) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = np.asarray(config.cut(tokens))
        scored = len(tokens) - 1
        cold = min(W, scored)
        total = -(-(scored - cold) // B) + 1
        text_1T = tokens[None, : cold + 1].astype(np.int32)
        sums = [first(params, text_1T[:, :-1], text_1T[:, 1:])]
        progress(1, total)
        prepared = make_ready(params) if scored > cold else None
        for number, batch in enumerate(windows(tokens, W, B)):
            sums.append(score(prepared, *batch))
            if number % 8 == 7:
                jax.block_until_ready(sums[-1])  # progress counts finished windows
            progress(number + 2, total)
        return {
            **summarize(sums, scored, started),
            "windows": scored - cold + 1,
            "cold_tokens": cold - 1,
            # The config's memory and segment lengths do not apply.
            **{"tgt_len": 1, "mem_len": 0, "ext_len": 0},
            **{"same_length": False, "warm_start": False},
        }

    return evaluate
