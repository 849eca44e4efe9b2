"""Pieces of the text on three devices: each layer passes the newest states on."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from style import BLUE, INK, MUTED, SAND, SKY, blank, cell, save

from txl_jax.model.memory.halo import split_oldest
from txl_jax.model.memory.interval import find_oldest

P, X, M = 3, 4, 3
T = P * X
STEP = M + X + 1.6  # between the left ends of two devices
INPUT, KEYS = 4.0, 0.0  # the rows' upper edges, downwards


def states(axes: Axes, left: float, top: float, first: int, count: int) -> None:
    """Draws consecutive states; states in the memory have negative numbers."""
    for i in range(first, first + count):
        cell(axes, left + i - first, top, str(i), SAND if i < 0 else SKY)


def arrow(axes: Axes, start: float, end: float, color: str = MUTED) -> None:
    """Draws an arrow from the layer's input at x = start to its keys at x = end."""
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.4}
    places = (end, -KEYS - 1.1), (start, -INPUT + 0.1)
    axes.annotate("", *places, arrowprops=style)


figure, axes = plt.subplots(figsize=(7.4, 2.3))
blank(axes)
oldest_YX = split_oldest(find_oldest(jnp.array([M]), None, M, T, 0, X), P)
# A piece of one segment needs the M states before it, and no older ones.
np.testing.assert_array_equal(oldest_YX, 0)
for p in range(P):
    left = p * STEP
    states(axes, left, KEYS, p * X - M, M + X)
    states(axes, left + M, INPUT, p * X, X)
    arrow(axes, left + M + X / 2, left + M + X / 2)
    middle = left + (M + X) / 2
    axes.text(middle, -KEYS + 0.5, f"device {p + 1}", ha="center", fontsize=8.5)
    for edge in (M, 0):
        axes.plot([left + edge] * 2, [-KEYS, -KEYS - 1], color=INK, linewidth=0.9)
    newest = left + X  # the M newest of the piece begin here
    for x, y in ((newest, INPUT), (left, KEYS)):
        frame = {"facecolor": "none", "edgecolor": BLUE, "linewidth": 1.6, "zorder": 4}
        axes.add_patch(plt.Rectangle((x, -y - 1), M, 1, **frame))
    if p + 1 < P:
        arrow(axes, newest + M / 2, left + STEP + M / 2, BLUE)
axes.text(-0.1, -INPUT - 0.5, "memory", va="center", color=MUTED, fontsize=8)
arrow(axes, M / 2, M / 2)
end = (P - 1) * STEP + X + M
axes.text(
    end + 0.4, -INPUT - 0.5, "the next memory", va="center", color=MUTED, fontsize=8
)
for y, name in ((KEYS, "keys"), (INPUT, "input")):
    axes.text(-0.6, -y - 0.5, name, ha="right", va="center", fontsize=8.5)
axes.set_xlim(-2.6, end + 5.2)
axes.set_ylim(-INPUT - 1.2, KEYS + 1.6)
save(figure, __file__)
