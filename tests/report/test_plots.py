"""Pictures of a run: its losses and baselines in bits, and sweeps."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from txl_jax.report.plots import plot_loss

BASELINES = {"order-2": 2.5, "xz -9": 1.75}


def lines(count: int, valid_every: int = 0) -> list[dict[str, Any]]:
    """Returns lines of metrics.jsonl with a falling loss, in nats."""
    made: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        exact = {"loss": 5.5 / step**0.25, "lr": 1e-3 / step}
        if valid_every and step % valid_every == 0:
            exact["valid_nll"] = exact["loss"] + 0.125
        made.append({"step": step, "exact": exact, "timing": {}})
    return made


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    kept: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **settings: Any) -> None:
        kept.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def points(curve: Any) -> list[list[float]]:
    return [np.asarray(values).tolist() for values in curve.get_data()]


def test_curves_show_bits_by_step(figures: list[Figure], tmp_path: Path) -> None:
    metrics = lines(40, valid_every=10)
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
