"""Plots of a run's losses and of evaluations, as PNG files."""

import math
from pathlib import Path
from typing import Any

import numpy as np


def empty(width: float, height: float) -> Any:
    """Returns an empty figure; width and height are in inches."""
    import matplotlib.figure  # takes 0.3 s; only modes that plot need it

    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def plot_loss(
    lines: list[dict[str, Any]], path: Path, baselines: dict[str, float]
) -> None:
    """Draws training and validation loss in bits per token against the step.

    The learning rate, where the lines have it, is drawn below. `lines` are those of
    metrics.jsonl; `baselines` are drawn as named levels.
    """
    step = np.array([line["step"] for line in lines])
    losses = [line["exact"]["loss"] for line in lines]
    loss_bits = np.array(losses, float) / math.log(2)
    # A skipped update has no finite loss.
    step, loss_bits = step[np.isfinite(loss_bits)], loss_bits[np.isfinite(loss_bits)]
    if not len(step):
        return
    rates = [(line["step"], line["exact"].get("lr")) for line in lines]
    rates = [(step, rate) for step, rate in rates if rate is not None]
    figure = empty(8, 5)
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
    best = min([smooth.min(), *baselines.values()])
    bottom, top = best * 0.9, max(np.percentile(loss_bits, 98), best * 1.5)
    axes.set_ylim(bottom, top)
    for names, level in _labels(baselines, (top - bottom) / 30):
        axes.annotate(
            names,
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(4, -3),
            textcoords="offset points",
            fontsize=8,
            color="gray",
        )
    for level in baselines.values():
        axes.axhline(level, color="gray", linestyle=":", linewidth=1)
    axes.set_ylabel("bits per token")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_sweep(result: dict[str, Any], path: Path) -> None:
    """Draws perplexity, and bits per token, against the field that was swept.

    `result` is returned by `evaluate.sweep.run`. Values that are not numbers, or one of
    which means "off", are evenly spaced.
    """
    field, rows = result["sweep"], result["rows"]
    values, ppl = [row[field] for row in rows], [row["ppl"] for row in rows]
    evenly = field in ("same_length", "clamp_len")
    at = {value: n if evenly else value for n, value in enumerate(values)}
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    axes.plot(
        [at[value] for value in values], ppl, "o-", color="tab:blue", markersize=4
    )
    for name, key, color in (
        ("training's", "init", "tab:orange"),
        ("the least that reaches the best", "shortest", "tab:green"),
    ):
        value = result[key]
        axes.plot(
            [at[value]],
            [ppl[values.index(value)]],
            "D" if key == "init" else "s",
            color=color,
            markersize=9 if key == "init" else 7,
            label=f"{field} = {value}, {name}: {ppl[values.index(value)]:.2f}",
        )
    if evenly:
        words = [
            "off" if value == 0 and field == "clamp_len" else value for value in values
        ]
        axes.set_xticks(list(at.values()), [str(word).lower() for word in words])
    axes.set(xlabel=f"eval.{field}", ylabel="perplexity")
    bits = axes.secondary_yaxis("right", functions=(_log2, _exp2))
    bits.set_ylabel("bits per token")
    axes.legend(loc="best")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def _log2(x: Any) -> Any:
    return np.log2(np.maximum(x, 1e-9))  # an axis may include 0


def _exp2(x: Any) -> Any:
    return np.exp2(x)


def plot_cold_start(nll_T: np.ndarray, result: dict[str, Any], path: Path) -> None:
    """Draws bits per token against the number of tokens read since a cold start.

    `result` is returned by `evaluate.cold_start.run`; the line connects its bins.
    """
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    read = np.arange(1, len(nll_T) + 1)
    label = f"mean of {result['pieces']} cold starts"
    bits = nll_T / math.log(2)
    axes.plot(read, bits, ".", color="tab:blue", alpha=0.25, markersize=3, label=label)
    rows = result["rows"]
    middle = [
        math.sqrt(row["from_tokens_read"] * row["to_tokens_read"]) for row in rows
    ]
    binned = [row["bpc"] for row in rows]
    axes.plot(
        middle, binned, "o-", color="tab:blue", markersize=4, label="mean of bins"
    )
    settled = result["settled_bpc"]
    label = f"mean of the last quarter: {settled:.3f}"
    axes.axhline(settled, color="gray", linestyle=":", linewidth=1, label=label)
    for name, color in (("tgt_len", "tab:orange"), ("mem_len", "tab:green")):
        if 0 < result[name] <= len(nll_T):
            axes.axvline(
                result[name],
                color=color,
                linestyle="--",
                linewidth=1,
                label=f"eval.{name} = {result[name]}",
            )
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(int(math.log2(len(nll_T))) + 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="tokens read since the cold start", ylabel="bits per token")
    axes.legend(loc="upper right", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def plot_speed(result: dict[str, Any], path: Path) -> None:
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
        rows = [row for row in result["rows"] if key in row]
        axes.plot(
            [row["attention_len"] for row in rows],
            [row[key] for row in rows],
            style,
            color=color,
            markersize=5,
            label=label,
        )
    axes.set_ylim(bottom=0)
    lengths = [row["attention_len"] for row in result["rows"]]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(xlabel="attention length", ylabel="time per token, cached = 1")
    axes.legend(loc="upper left", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def _labels(levels: dict[str, float], min_gap: float) -> list[tuple[str, float]]:
    """Returns (names, level), merging levels less than `min_gap` above another."""
    labels: list[tuple[str, float]] = []
    for name, level in sorted(levels.items(), key=lambda item: item[1]):
        if labels and level - labels[-1][1] < min_gap:
            labels[-1] = (f"{labels[-1][0]}, {name}", labels[-1][1])
        else:
            labels.append((name, level))
    return labels
