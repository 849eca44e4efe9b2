"""Windows as in Al-Rfou et al. (2018) (section 4.5, Table 9).

The token after a window of W tokens is predicted without a memory: the whole window is
computed, and only its last position predicts.

Dims: B windows, W tokens of a window, N layers, D model, H heads, A head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.xla import heads_first
from txl_jax.model.block import FeedForward
from txl_jax.model.config import ModelConfig
from txl_jax.model.decoder import Decoder, DecoderAttention
from txl_jax.model.key_values import KeyValues, project
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES
from txl_jax.model.txl import TransformerXL


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


def last_nll(
    config: ModelConfig,
    params: Any,
    layers: tuple[KeyValues, ...],
    tokens_BW: Array,
    target_B: Array,
) -> Array:
    """Returns the nll of the token after each window, nll_B in nats.

    The result equals the last column of `whole_nll`, without unused computation. The
    last layer computes keys and values at all positions, and everything else, like the
    softmax, at the last position only. Scores of future keys are skipped if
    config.kernel skips them. `params` are unstacked; `layers` have the W distances that
    all windows share, and no keys (`reader.empty_memory`).
    """
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
        for layer in layers
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
