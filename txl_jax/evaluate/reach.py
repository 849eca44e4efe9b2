"""How far back an output can depend on a token: the O(N x L) of section 3.2, exactly.

A layer sees the memory and its segment, and what it sees in the memory saw its own
memory: each layer reaches one memory further. `farthest` is the formula; `reach`
changes one token after the other and looks for outputs that change.

Dims: N layers, L segment, M memory, T tokens, D model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax import Array
from matplotlib.colors import LogNorm

from txl_jax.errors import UserError
from txl_jax.model import memory as memories
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.state import abstract_params


def farthest(config: ModelConfig, tgt_len: int, n_layer: int = 0) -> int:
    """Returns how many tokens back the last of a segment can depend on one, at most.

    n_layer: after so many layers, 0 = all. The first layer's oldest key is M before
    the segment. That token was read in a segment of its own, whose start is M or more
    back, up to a whole number of segments: L ceil(M / L). With same_length each layer
    adds as many tokens as it sees, less its own. Without a memory the segment is all.
    """
    N, L, M = n_layer or config.n_layer, tgt_len, config.mem_len
    if config.same_length:
        return N * (memories.reach(config, M) - 1)
    if not M:
        return L - 1
    return L - 1 + M + (N - 1) * L * math.ceil(M / L)


Changes = Callable[[Any, np.ndarray], np.ndarray]


def make_changes(config: ModelConfig, tgt_len: int) -> Changes:
    """Returns changes(params, tokens_T) -> [N, T], T being a multiple of tgt_len.

    They are how much each layer's output at the last token changes, column d being for
    another token at distance d. 0 says that not one bit changed: each text is read by
    itself, by the same instructions.
    """
    if not config.mem_len:
        raise UserError(
            "model.mem_len = 0: the reach of a model without memory is its segment"
        )
    model = TransformerXL(config)

    def read(params: Any, tokens_T: Array) -> Array:
        """Returns each layer's output at the last token, [N, D]."""

        def segment(memory: Memory, tokens_L: Array) -> tuple[Memory, Array]:
            hidden_BLD, memory = model.apply({"params": params}, tokens_L[None], memory)  # type: ignore
            return memory, hidden_BLD[0, -1:]

        memory, hidden_S1D = jax.lax.scan(
            segment, Memory.empty(config, 1), tokens_T.reshape(-1, tgt_len)
        )
        # What the next layer has in its memory of the last token is its output.
        return jnp.concatenate([memory.h_NBMD[1:, 0, -1], hidden_S1D[-1]])

    @jax.jit
    def read_all(params: Any, texts_XT: Array) -> Array:
        return jax.lax.map(functools.partial(read, params), texts_XT)

    def changes(params: Any, tokens_T: np.ndarray) -> np.ndarray:
        T = len(tokens_T)
        # One text for each distance, and as the last one the text as it is.
        texts_XT = np.tile(tokens_T, (T + 1, 1))
        place_T = T - 1 - np.arange(T)
        texts_XT[np.arange(T), place_T] = (tokens_T[place_T] + 1) % config.vocab_size
        output_XND = np.asarray(read_all(params, texts_XT))
        return np.abs(output_XND[:-1] - output_XND[-1]).max(axis=-1).T

    return changes


def random_params(config: ModelConfig, rng: np.random.Generator) -> Any:
    """Returns weights so strong that float32 keeps what passes through every layer."""

    def draw(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        weights = rng.normal(centre, config.d_model**-0.5, leaf.shape)
        return weights.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, nn.unbox(abstract_params(config)))


def reach(config: ModelConfig, tgt_len: int, seeds: int = 2) -> np.ndarray:
    """Returns the greatest changes [N, T] over random weights and texts.

    The text is two segments longer than `farthest`.
    """
    config = dataclasses.replace(config, dropout=0.0, dropatt=0.0)
    T = tgt_len * (math.ceil((farthest(config, tgt_len) + 1) / tgt_len) + 2)
    changes = make_changes(config, tgt_len)
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        tokens_T = rng.integers(0, config.vocab_size, T, dtype=np.int32)
        found.append(changes(random_params(config, rng), tokens_T))
    return np.max(found, axis=0)


def measured(change_NT: np.ndarray) -> list[int]:
    """Returns the farthest distance that changes each layer's output."""
    return [int(np.flatnonzero(change_T)[-1]) for change_T in change_NT]


def plot(change_NT: np.ndarray, config: ModelConfig, tgt_len: int, path: Path) -> None:
    """Draws the changes by distance and layer, with what the formula says."""
    N, T = change_NT.shape
    figure = matplotlib.figure.Figure(figsize=(8, 0.5 * N + 1.6), layout="constrained")
    axes = figure.add_subplot()
    seen_NT = np.ma.masked_equal(change_NT, 0)
    picture = axes.imshow(
        seen_NT,
        aspect="auto",
        origin="lower",
        extent=(-0.5, T - 0.5, 0.5, N + 0.5),
        norm=LogNorm(seen_NT.min(), seen_NT.max()),
        cmap="viridis",
        interpolation="nearest",
    )
    for n in range(1, N + 1):
        edge = farthest(config, tgt_len, n) + 0.5
        axes.plot([edge, edge], [n - 0.5, n + 0.5], color="tab:red", linewidth=2.5)
    for edge in range(tgt_len, T, tgt_len):
        axes.axvline(edge - 0.5, color="gray", linewidth=0.4, linestyle=":")
    axes.plot([], [], color="tab:red", linewidth=2.5, label="the formula")
    axes.legend(loc="lower right", fontsize=8)
    axes.set(
        xlabel="distance of the changed token",
        ylabel="layer",
        yticks=range(1, N + 1),
        title=f"segments of {tgt_len}, memory {config.mem_len}: "
        "what changes the last output (white: not one bit)",
    )
    axes.title.set_fontsize(9)
    figure.colorbar(picture, label="greatest change", pad=0.01)
    figure.savefig(path, dpi=100)
