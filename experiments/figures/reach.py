"""How far back an output depends on a token, on random weights: a figure.

    python -m txl_jax.experiments.figures.reach [--n_layer=4 --tgt_len=8 --mem_len=8]

The dependency length of section 3.2 is O(N x L). This program changes one token at a
time, at every distance, and compares the outputs of all layers bit for bit. It prints
one JSON line with the predicted and the measured distances, and writes a PNG.

Dims: N layers, L segment, T tokens, X texts, D model.
"""

import argparse
import dataclasses
import functools
import math
import sys
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
from txl_jax.model.config import ModelConfig
from txl_jax.model.interval import count_keys
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.state import abstract_params

from . import program


def effective_context(config: ModelConfig, tgt_len: int, n_layer: int = 0) -> float:
    """Returns the number of tokens before a segment that reach its first prediction.

    n_layer: the number of layers to count, 0 = all. This is the paper's O(N x L),
    exactly N x M if M is a multiple of L. The oldest of M remembered tokens was read in
    an earlier segment, whose first token saw M tokens before it, so every layer but the
    last reaches M rounded up to whole segments. With same_length every token sees the
    same number of keys, itself included, and each layer reaches that far. With
    fast weights, each segment adds to the reach: infinity.
    """
    N, M, L = n_layer or config.n_layer, config.mem_len, tgt_len
    if not config.mem_len:
        return 0
    if config.fast_weights:
        return math.inf
    keys, oldest = count_keys(config, M), 0  # the oldest token that counts so far
    for _ in range(N):
        oldest = oldest + 1 - keys if keys else oldest // L * L - M
    return -oldest


def farthest(config: ModelConfig, tgt_len: int, n_layer: int = 0) -> int:
    """Returns the longest distance on which the last token of a segment depends.

    n_layer: number of layers, 0 = all.
    """
    context = int(effective_context(config, tgt_len, n_layer))
    # With same_length every token of a segment reaches equally far back.
    return context if config.same_length else context + tgt_len - 1


def measure_changes(
    config: ModelConfig, tgt_len: int, params: Any, tokens_T: np.ndarray
) -> np.ndarray:
    """Returns how much each layer's last output changes, [N, T], by distance.

    Column d has the effect of another token at distance d; 0 means that no bit changed.
    Each text is read separately, by the same instructions. T is a multiple of tgt_len.
    """
    model = TransformerXL(config)

    def last_outputs(tokens_T: Array) -> Array:
        """Returns each layer's output at the last token, [N, D]."""

        def segment(memory: Memory, tokens_L: Array) -> tuple[Memory, Array]:
            hidden_BLD, memory = model.apply({"params": params}, tokens_L[None], memory)  # type: ignore
            return memory, hidden_BLD[0, -1:]

        memory, hidden_S1D = jax.lax.scan(
            segment, Memory.empty(config, 1), tokens_T.reshape(-1, tgt_len)
        )
        # A layer's output at the last token is the newest memory of the next layer.
        return jnp.concatenate([memory.h_NBMD[1:, 0, -1], hidden_S1D[-1]])

    T = len(tokens_T)
    # One text for each distance; the last text is unchanged.
    texts_XT = np.tile(tokens_T, (T + 1, 1))
    place_T = T - 1 - np.arange(T)
    texts_XT[np.arange(T), place_T] = (tokens_T[place_T] + 1) % config.vocab_size
    output_XND = np.asarray(
        jax.jit(functools.partial(jax.lax.map, last_outputs))(texts_XT)
    )
    return np.abs(output_XND[:-1] - output_XND[-1]).max(axis=-1).T


def random_params(config: ModelConfig, rng: np.random.Generator) -> Any:
    """Returns weights large enough for float32 to keep a change in every layer."""

    def draw(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        weights = rng.normal(centre, config.d_model**-0.5, leaf.shape)
        return weights.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, nn.unbox(abstract_params(config)))


def reach(config: ModelConfig, tgt_len: int, seeds: int = 2) -> np.ndarray:
    """Returns the greatest changes [N, T] over random weights and texts.

    The text is two segments longer than `farthest`.
    """
    if not config.mem_len:
        raise UserError(
            "model.mem_len = 0: the reach of a model without memory is its segment"
        )
    config = dataclasses.replace(config, dropout=0.0, dropatt=0.0)
    T = tgt_len * (math.ceil((farthest(config, tgt_len) + 1) / tgt_len) + 2)
    changes = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        tokens_T = rng.integers(0, config.vocab_size, T, dtype=np.int32)
        params = random_params(config, rng)
        changes.append(measure_changes(config, tgt_len, params, tokens_T))
    return np.max(changes, axis=0)


def measured(change_NT: np.ndarray) -> list[int]:
    """Returns the longest distance that changes each layer's output."""
    return [int(np.flatnonzero(change_T)[-1]) for change_T in change_NT]


def plot(change_NT: np.ndarray, config: ModelConfig, tgt_len: int, path: Path) -> None:
    """Draws the changes by distance and layer, with the formula's distances."""
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
        "effect on the last output (white: not one bit changed)",
    )
    axes.title.set_fontsize(9)
    figure.colorbar(picture, label="greatest change", pad=0.01)
    figure.savefig(path, dpi=100)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = program.make_parser(__doc__)
    parser.add_argument("--n_layer", type=program.count, default=4)
    parser.add_argument(
        "--tgt_len", type=program.count, default=8, help="tokens of a segment"
    )
    parser.add_argument("--mem_len", type=int, default=8, help="memory")
    parser.add_argument("--same_length", action="store_true")
    parser.add_argument(
        "--seeds", type=program.count, default=2, help="random models and texts"
    )
    parser.add_argument("--picture", type=program.picture, default=Path("reach.png"))
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the distances of the formula and of the model; draws the picture."""
    config = ModelConfig(
        vocab_size=16,
        n_layer=args.n_layer,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        mem_len=args.mem_len,
        same_length=args.same_length,
    )
    change_NT = reach(config, args.tgt_len, args.seeds)
    layers = range(1, args.n_layer + 1)
    formula = [farthest(config, args.tgt_len, n) for n in layers]
    distances = measured(change_NT)
    plot(change_NT, config, args.tgt_len, args.picture)
    sizes = ("n_layer", "tgt_len", "mem_len", "same_length", "seeds")
    return {
        "program": "reach",
        **{name: getattr(args, name) for name in sizes},
        "formula_tokens": formula,
        "measured_tokens": distances,
        "exact": formula == distances,
        "tried_tokens": change_NT.shape[1],
        "picture": str(args.picture),
    }


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
