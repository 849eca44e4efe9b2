"""Pictures of a run, as PNG."""

import math
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np


def plot_loss(
    lines: list[dict[str, Any]], path: Path, yardsticks: dict[str, float]
) -> None:
    """Draws training and validation loss in bits per token against the step.

    `lines` are those of metrics.jsonl; `yardsticks` are drawn as named levels.
    """
    step = np.array([line["step"] for line in lines])
    loss_bits = np.array([line["exact"]["loss"] for line in lines]) / math.log(2)
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(step, loss_bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(len(step) // 50, 1)
    smooth = np.convolve(loss_bits, np.ones(window) / window, mode="valid")
    axes.plot(step[window - 1 :], smooth, color="tab:blue", label="train")
    valid = [line for line in lines if "valid_nll" in line["exact"]]
    axes.plot(
        [line["step"] for line in valid],
        [line["exact"]["valid_nll"] / math.log(2) for line in valid],
        "o-",
        color="tab:orange",
        label="valid",
    )
    for name, bits in yardsticks.items():
        axes.axhline(bits, color="gray", linestyle=":", linewidth=1)
        axes.annotate(
            name,
            (1, bits),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="gray",
        )
    best = min([smooth.min(), *yardsticks.values()])
    axes.set_ylim(best * 0.9, max(np.percentile(loss_bits, 98), best * 1.5))
    axes.set(xlabel="update", ylabel="bits per token")
    axes.legend(loc="upper right", bbox_to_anchor=(0.85, 1))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
