"""Pictures of a run, as PNG: its losses, and the learning rate below them."""

import math
from pathlib import Path
from typing import Any

import numpy as np


def plot_loss(
    lines: list[dict[str, Any]], path: Path, yardsticks: dict[str, float]
) -> None:
    """Draws training and validation loss in bits per token against the step.

    Below them, the learning rate, where the lines have it. `lines` are those of
    metrics.jsonl; `yardsticks` are drawn as named levels.
    """
    import matplotlib.figure  # takes 0.3 s, which no other mode is to wait for

    step = np.array([line["step"] for line in lines])
    losses = [line["exact"]["loss"] for line in lines]
    loss_bits = np.array(losses, float) / math.log(2)
    # A skipped update has no finite loss.
    step, loss_bits = step[np.isfinite(loss_bits)], loss_bits[np.isfinite(loss_bits)]
    if not len(step):
        return
    rates = [(line["step"], line["exact"].get("lr")) for line in lines]
    rates = [(step, rate) for step, rate in rates if rate is not None]
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    if rates:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        below.plot(*zip(*rates, strict=True), color="tab:green", linewidth=1)
        below.set(xlabel="update", ylabel="learning rate", ylim=(0, None))
        below.grid(alpha=0.3)
    else:
        axes = figure.add_subplot(xlabel="update")
    axes.plot(step, loss_bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(len(step) // 50, 1)
    smooth = np.convolve(loss_bits, np.ones(window) / window, mode="valid")
    axes.plot(step[window - 1 :], smooth, color="tab:blue", label="train")
    valid = [line for line in lines if line["exact"].get("valid_nll") is not None]
    axes.plot(
        [line["step"] for line in valid],
        [line["exact"]["valid_nll"] / math.log(2) for line in valid],
        "o-",
        color="tab:orange",
        label="valid",
    )
    best = min([smooth.min(), *yardsticks.values()])
    bottom, top = best * 0.9, max(np.percentile(loss_bits, 98), best * 1.5)
    axes.set_ylim(bottom, top)
    for names, level in _labels(yardsticks, (top - bottom) / 30):
        axes.annotate(
            names,
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(4, -3),
            textcoords="offset points",
            fontsize=8,
            color="gray",
        )
    for level in yardsticks.values():
        axes.axhline(level, color="gray", linestyle=":", linewidth=1)
    axes.set_ylabel("bits per token")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _labels(levels: dict[str, float], apart: float) -> list[tuple[str, float]]:
    """Returns (names, level), levels less than `apart` from the one below as one."""
    found: list[tuple[str, float]] = []
    for name, level in sorted(levels.items(), key=lambda item: item[1]):
        if found and level - found[-1][1] < apart:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, level))
    return found
