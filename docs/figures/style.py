"""Colours, sizes and file format of all figures.

`for f in docs/figures/[!s]*.py; do python $f; done` redraws all of them.
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#222222"
MUTED = "#8a8f98"
GRID = "#d5d8dd"
BLUE = "#2f6fb7"
SKY = "#cfe1f4"
ORANGE = "#d9822b"
SAND = "#fae3c6"
GREEN = "#3d8f5f"
MINT = "#cfe9d8"
RED = "#b8434e"
PALE = "#f3f4f6"

plt.rcParams.update(
    {
        "font.family": "sans-serif",
        # Texts stay texts: the reader's own font, none of them wider than the first.
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.hashsalt": "txl_jax",
        "svg.fonttype": "none",
    }
)


def save(figure: Figure, script: str) -> None:
    """Writes the figure beside its script, as SVG."""
    path = Path(script).with_suffix(".svg")
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08, metadata={"Date": None})
    plt.close(figure)


def blank(axes: Axes) -> None:
    """Leaves the axes' frame, ticks and distortion out."""
    axes.set_aspect("equal")
    axes.axis("off")


def cell(
    axes: Axes, x: float, y: float, text: str, face: str, *, ink: str = INK
) -> None:
    """Draws a unit square with its upper left corner at (x, -y), and a text in it."""
    axes.add_patch(plt.Rectangle((x, -y - 1), 1, 1, facecolor=face, edgecolor="white"))
    axes.text(x + 0.5, -y - 0.5, text, ha="center", va="center", color=ink)
