"""The picture of a run shows its losses and baselines, in bits, as a PNG."""

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from txl_jax.report.plots import plot_loss, plot_speed, plot_sweep

BASELINES = {"order-2": 2.5, "xz -9": 1.75}


def lines(count: int, valid_every: int = 0) -> list[dict[str, Any]]:
    """Returns lines of metrics.jsonl with a falling loss, in nats."""
    made: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        exact = {"loss": 5.5 / step**0.25}
        if valid_every and step % valid_every == 0:
            exact["valid_nll"] = exact["loss"] + 0.125
        made.append({"step": step, "exact": exact, "timing": {}})
    return made


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    height, width = pixels.shape[:2]
    assert height >= 400 and width >= 700
    assert pixels.std() > 0.01, "something is drawn"


@pytest.mark.parametrize(
    "count, valid_every, baselines",
    [(1, 0, {}), (1, 1, BASELINES), (7, 3, {}), (400, 100, BASELINES)],
)
def test_any_run_makes_a_picture(
    tmp_path: Path, count: int, valid_every: int, baselines: dict[str, float]
) -> None:
    plot_loss(lines(count, valid_every), tmp_path / "loss.png", baselines)
    assert_picture(tmp_path / "loss.png")


def test_curves_are_bits_at_their_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Figure] = []
    # Keeps the figure instead of saving it.
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    given = lines(40, valid_every=10)
    plot_loss(given, tmp_path / "loss.png", BASELINES)
    (axes,) = figures[0].axes
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    steps, bits = curves["train"].get_data()
    assert np.asarray(steps).tolist() == list(range(1, 41))
    assert np.asarray(bits).tolist() == pytest.approx(
        [line["exact"]["loss"] / math.log(2) for line in given]
    )
    steps, bits = curves["valid"].get_data()
    assert np.asarray(steps).tolist() == [10, 20, 30, 40]
    assert np.asarray(bits).tolist() == pytest.approx(
        [line["exact"]["valid_nll"] / math.log(2) for line in given[9::10]]
    )
    assert {text.get_text() for text in axes.texts} == set(BASELINES)
    low, high = axes.get_ylim()
    assert low < min(BASELINES.values()) and high > max(BASELINES.values())


def test_the_learning_rate_is_below_the_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plot_loss(given := with_rates(lines(40)), tmp_path / "loss.png", {})
    assert_picture(tmp_path / "loss.png")
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    plot_loss(given, tmp_path / "loss.png", {})
    losses, below = figures[0].axes
    assert (losses.get_ylabel(), below.get_ylabel()) == (
        "bits per token",
        "learning rate",
    )
    (curve,) = below.get_lines()
    steps, rates = curve.get_data()
    assert np.asarray(steps).tolist() == list(range(1, 41))
    assert np.asarray(rates).tolist() == [line["exact"]["lr"] for line in given]


def with_rates(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in given:
        line["exact"]["lr"] = 1e-3 / line["step"]
    return given


def test_baselines_too_close_to_read_share_a_label(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    levels = {"order-3": 2.001, "xz -9": 3.0, "order-2": 2.0}
    plot_loss(lines(40), tmp_path / "loss.png", levels)
    (axes,) = figures[0].axes
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["order-2, order-3", "xz -9"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_skipped_update_does_not_cost_the_picture(
    tmp_path: Path, bad: float | None
) -> None:
    given = lines(4, valid_every=2)
    given[2]["exact"]["loss"] = given[3]["exact"]["valid_nll"] = bad
    plot_loss(given, tmp_path / "loss.png", {})
    assert_picture(tmp_path / "loss.png")


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Returns the figures that are kept instead of saved from here on."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    return figures


def test_a_sweep_shows_training_s_value_and_the_shortest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = drawn(monkeypatch)
    rows = [{"clamp_len": value, "ppl": ppl} for value, ppl in ((9, 4.0), (0, 3.0))]
    result = {"sweep": "clamp_len", "rows": rows, "init": 0, "shortest": 9}
    plot_sweep(result, tmp_path / "sweep.png")
    (axes,) = figures[0].axes
    curve, init, shortest = (line.get_xydata() for line in axes.get_lines())
    assert np.asarray(curve).tolist() == [[0, 4], [1, 3]]
    assert np.asarray(init).tolist() == [[1, 3]]
    assert np.asarray(shortest).tolist() == [[0, 4]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["9", "off"]


def test_the_speed_table_draws_the_paper_s_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = drawn(monkeypatch)
    keys = ("ratio", "predicted_ratio", "fair_ratio", "predicted_fair_ratio")
    rows: list[dict[str, Any]] = [
        {"attention_len": length, **dict.fromkeys(keys, length / 2)}
        for length in (800, 900)
    ]
    rows[0]["paper_ratio"] = 363
    plot_speed({"rows": rows}, tmp_path / "speed.png")
    *ours, paper = (line.get_xydata() for line in figures[0].axes[0].get_lines())
    assert np.asarray(paper).tolist() == [[800, 363]]
    assert [np.asarray(xy).tolist() for xy in ours] == [[[800, 400], [900, 450]]] * 4
