"""The picture of a run has its losses and baselines in bits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from txl_jax.report.plots import plot_loss

BASELINES = {"order-2": 2.5, "xz -9": 1.75}


def points(curve: Any) -> list[list[float]]:
    return [np.asarray(values).tolist() for values in curve.get_data()]


def test_curves_show_bits_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
    )
    metrics: list[dict[str, Any]] = []
    for step in range(1, 41):
        exact = {"loss": 5.5 / step**0.25, "lr": 1e-3 / step}
        if step % 10 == 0:
            exact["valid_nll"] = exact["loss"] + 0.125
        metrics.append({"step": step, "exact": exact, "timing": {}})
    metrics[4]["exact"]["loss"] = metrics[19]["exact"]["valid_nll"] = None
    metrics[5]["exact"]["loss"] = math.nan  # an update that was skipped
    plot_loss(metrics, tmp_path / "loss.png", BASELINES)
    axes, below = figures[0].axes
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    steps = [*range(1, 5), *range(7, 41)]
    bits = [metrics[step - 1]["exact"]["loss"] / math.log(2) for step in steps]
    assert points(curves["train"]) == [steps, pytest.approx(bits)]
    bits = [metrics[step - 1]["exact"]["valid_nll"] / math.log(2) for step in (10, 40)]
    assert points(curves["valid"])[1][::2] == pytest.approx(bits)
    assert points(curves["valid"])[0] == [10, 30, 40]
    assert [points(curves[name])[1][0] for name in BASELINES] == [2.5, 1.75]
    low, high = axes.get_ylim()
    assert low < min(BASELINES.values()) and high > max(BASELINES.values())
    assert below.get_ylabel() == "learning rate"
    rates = [line["exact"]["lr"] for line in metrics]
    assert points(below.get_lines()[0]) == [list(range(1, 41)), rates]
