"""Every mask is an interval of keys: reasons that raise its older end."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from style import BLUE, GRID, INK, SAND, SKY, blank, save

from txl_jax.kernels.xla import visible_BLK
from txl_jax.model.interval import find_oldest

L, M = 6, 6


def draw(axes: Axes, oldest_L: np.ndarray, M: int) -> None:
    """Draws the keys that each query sees, of memory and segment."""
    blank(axes)
    L = len(oldest_L)
    seen_LK = np.asarray(visible_BLK(jnp.asarray(oldest_L)[None], M + L))[0]
    for i, oldest in enumerate(oldest_L.tolist()):
        keys = np.flatnonzero(seen_LK[i])
        assert (np.diff(keys) == 1).all()  # an interval
        for face, low, high in ((SAND, 0, M), (SKY, M, M + L)):
            part = keys[(low <= keys) & (keys < high)]
            if len(part):
                axes.add_patch(
                    plt.Rectangle((part[0], -i - 1), len(part), 1, facecolor=face)
                )
        axes.plot([oldest] * 2, [-i, -i - 1], color=BLUE, linewidth=2.2, zorder=3)
    axes.hlines(range(-L, 1), 0, M + L, color=GRID, linewidth=0.6)
    axes.vlines(range(M + L + 1), -L, 0, color=GRID, linewidth=0.6)
    axes.plot([M, M], [0.15, -L - 0.15], color=INK, linewidth=0.9)
    axes.text(M / 2, -L - 0.35, "memory", ha="center", va="top", fontsize=7.5)
    axes.set_xlim(-0.3, M + L + 0.3)
    axes.set_ylim(-L - 1.6, 0.4)


if __name__ == "__main__":
    none, first = np.zeros((2, 1, L), bool)
    first[0, 3] = True
    cases = (
        ("full memory", M, none, 0),
        ("two slots filled", 2, none, 0),
        ("same_length", M, none, M),
        ("a document\nbegins at token 3", M, jnp.asarray(first), 0),
    )
    figure, row = plt.subplots(1, 4, figsize=(7.6, 1.9), gridspec_kw={"wspace": 0.12})
    for axes, (title, filled, first_BL, reach) in zip(row, cases, strict=True):
        oldest_BL = find_oldest(jnp.array([filled]), first_BL, M, L, reach)
        draw(axes, np.asarray(oldest_BL[0]), M)
        axes.set_title(title, fontsize=8.5, pad=3)
        axes.text(M + L / 2, -L - 0.35, "segment", ha="center", va="top", fontsize=7.5)
    x, y = -0.5, -L / 2
    row[0].text(x, y, "queries", rotation=90, ha="right", va="center", fontsize=8)
    save(figure, __file__)
