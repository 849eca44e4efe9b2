"""Plots of a run's losses and of a sweep, as PNG files."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from txl_jax.runtime.storage import Json, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty(width: float, height: float) -> "Figure":
    """Returns an empty figure; width and height are in inches."""
    import matplotlib.figure  # takes 0.3 s; only modes that plot need it

    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def finish(figure: "Figure") -> "Figure":
    """Adds grids, and legends where the figure has none."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        has_legend = axes.get_legend() or figure.legends
        if axes.get_legend_handles_labels()[1] and not has_legend:
            axes.legend(fontsize=9)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Finishes the figure and writes it as a PNG."""
    with replacing(path) as file:
        finish(figure).savefig(file, dpi=100)


def plot_loss(lines: list[Json], path: Path, baselines: dict[str, float]) -> None:
    """Draws losses and the `baselines` in bits per token, and the learning rate."""

    def curve(name: str) -> tuple[np.ndarray, np.ndarray]:
        step = np.array([x["step"] for x in lines])
        value = np.array([x["exact"].get(name) for x in lines], float)  # None = NaN
        return step[np.isfinite(value)], value[np.isfinite(value)]

    step, loss_nats = curve("loss")
    if not len(step):
        return
    loss_bits = loss_nats / math.log(2)
    figure = empty(8, 5)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    below.plot(*curve("lr"), color="tab:green", linewidth=1)
    below.set(xlabel="update", ylabel="learning rate", ylim=(0, None))
    axes.plot(step, loss_bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(len(step) // 50, 1)
    smooth = np.convolve(loss_bits, np.ones(window) / window, mode="valid")
    axes.plot(step[window - 1 :], smooth, color="tab:blue", label="train")
    step, valid_nats = curve("valid_nll")
    axes.plot(step, valid_nats / math.log(2), "o-", color="tab:orange", label="valid")
    best = min([smooth.min(), *baselines.values()])
    bottom, top = best * 0.9, max(np.percentile(loss_bits, 98), best * 1.5)
    for n, (name, level) in enumerate(baselines.items(), 2):
        axes.axhline(level, color=f"C{n}", linestyle=":", label=name)
    axes.set(ylabel="bits per token", ylim=(bottom, top))
    axes.legend(loc="upper right", fontsize=9)  # finding the best place takes long
    save(figure, path)


def plot_sweep(result: Json, path: Path) -> None:
    """Draws perplexity, and bits per token, against the field that was swept."""
    field, rows = result["sweep"], result["rows"]
    values, ppl = [row[field] for row in rows], [row["ppl"] for row in rows]
    evenly = field in ("same_length", "clamp_len")
    at = list(range(len(values))) if evenly else values
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    axes.plot(at, ppl, "o-", color="tab:blue", markersize=4)
    for name, key, marker, size, color in (
        ("training's", "init", "D", 9, "tab:orange"),
        ("the least that reaches the best", "shortest", "s", 7, "tab:green"),
    ):
        n = values.index(result[key])
        label = f"{field} = {values[n]}, {name}: {ppl[n]:.2f}"
        axes.plot([at[n]], [ppl[n]], marker, color=color, markersize=size, label=label)
    if evenly:
        off = "off" if field == "clamp_len" else "false"
        axes.set_xticks(at, [str(value or off).lower() for value in values])
    # An axis may include 0.
    to_bits_and_back = lambda x: np.log2(np.maximum(x, 1e-9)), np.exp2
    bits = axes.secondary_yaxis("right", functions=to_bits_and_back)
    bits.set_ylabel("bits per token")
    axes.set(xlabel=f"eval.{field}", ylabel="perplexity")
    save(figure, path)
