"""Plots of the attention of all heads, as in the paper's Appendix D.

Dims: N layers, H heads, R distances, L places in a segment.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from txl_jax.evaluate.attention_map import Maps
from txl_jax.evaluate.attention_probe import WHOLE

# The terms as lettered in section 3.3.
TITLES = {
    WHOLE: "all terms: the model's attention",
    "a": "(a) content",
    "b": "(b) content and distance",
    "c": "(c) bias of content",
    "d": "(d) bias of distance",
}


def plot_maps(maps: Maps, folder: Path) -> dict[str, Path]:
    """Writes every picture to the folder, and returns their paths by name."""
    paths = {}
    for name, draw in PLOTS.items():
        paths[name] = folder / f"attention_{name}.png"
        draw(maps).savefig(paths[name], dpi=100)
    return paths


def _draw_rows(
    axes: Axes, mean_NHR: np.ndarray, norm: LogNorm
) -> matplotlib.image.AxesImage:
    """Draws one row per head, the first layer on top, with lines between layers."""
    N, H, R = mean_NHR.shape
    image = axes.imshow(
        np.maximum(mean_NHR.reshape(N * H, R), norm.vmin or 0),
        norm=norm,
        cmap="magma_r",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, R - 0.5, N * H + 0.5, 0.5),
    )
    for n in range(1, N):
        axes.axhline(n * H + 0.5, color="gray", linewidth=0.6)
    return image


def _norm(R: int) -> LogNorm:
    """Returns the color scale of maps of R distances, around the uniform 1 / R."""
    return LogNorm(vmin=0.1 / R, vmax=0.5)


def _plot_heads(maps: Maps) -> Figure:
    N, H, R = maps.mean_NHR[WHOLE].shape
    figure = Figure(
        figsize=(8, min(max(2.2 + 0.11 * N * H, 3), 9)), layout="constrained"
    )
    axes = figure.add_subplot()
    image = _draw_rows(axes, maps.mean_NHR[WHOLE], _norm(R))
    axes.set(
        xlabel="distance back from the target, in tokens",
        ylabel=f"head ({H} per layer, the first layer on top)",
        title=f"mean attention of {maps.targets} targets",
    )
    label = f"probability (uniform: {1 / R:.1g})"
    figure.colorbar(image, ax=axes, extend="both", label=label)
    return figure


def _plot_terms(maps: Maps) -> Figure:
    names = list(maps.mean_NHR)
    R = maps.mean_NHR[WHOLE].shape[-1]
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns + 0.6, 2.7 * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in every.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(every.flat, names, strict=False):
        image = _draw_rows(axes, maps.mean_NHR[name], _norm(R))
        axes.set_title(TITLES[name], fontsize=9)
    figure.supxlabel("distance back from the target, in tokens", fontsize=9)
    figure.supylabel("head", fontsize=9)
    shown = every.flat[: len(names)].tolist()
    figure.colorbar(image, ax=shown, extend="both", label="probability")
    return figure


def _plot_memory(maps: Maps) -> Figure:
    N, H, L = maps.memory_NHL.shape
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, N))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    head_NH = maps.memory_NHL.mean(axis=2)
    left.bar(np.arange(1, N + 1), head_NH.mean(axis=1), color=colors)
    left.plot(np.repeat(np.arange(1, N + 1), H), head_NH.ravel(), "k.", markersize=4)
    left.set(xlabel="layer (points: its heads)", ylabel="attention on the memory")
    left.set_xticks(np.unique(np.linspace(1, N, min(N, 8)).round()))
    left.set_ylim(0, 1)
    R = maps.shown_NHIR.shape[-1]
    right.plot(
        1 - np.arange(1, L + 1) / R, color="gray", linestyle=":", label="uniform"
    )
    for n in range(N):
        label = f"layer {n + 1}" if n in (0, N - 1) else None
        right.plot(maps.memory_NHL[n].mean(axis=0), color=colors[n], label=label)
    right.set(xlabel="position of the target in its segment")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _plot_distances(maps: Maps) -> Figure:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    N = len(maps.similarity_NR)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, N))
    for n, row_R in enumerate(maps.similarity_NR):
        if len(row_R):
            label = f"W R, layer {n + 1}" if n in (0, N - 1) else None
            axes.plot(row_R, color=colors[n], label=label, linewidth=1)
    if len(maps.similarity_R):
        axes.plot(maps.similarity_R, color="black", label="R, the sinusoids")
    if axes.lines:
        axes.legend(fontsize=8)
    axes.set(xlabel="tokens between two distances", ylabel="mean cosine of their rows")
    axes.set_xscale("symlog", linthresh=1)
    axes.grid(alpha=0.3)
    return figure


PLOTS = {
    "heads": _plot_heads,
    "terms": _plot_terms,
    "memory": _plot_memory,
    "distances": _plot_distances,
}
