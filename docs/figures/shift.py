"""The linear-time shift: from distances to keys (Appendix B)."""

import matplotlib.pyplot as plt
from style import GRID, INK, MUTED, PALE, blank, cell, save

L, M = 3, 2
K = R = M + L
SHADES = ("#1f5a99", "#4d86bf", "#84aedb", "#b7d1ec", "#e2edf8")


def shade(distance: int) -> tuple[str, str]:
    """Returns the colours of a distance's cell and text."""
    return SHADES[distance], "white" if distance < 2 else INK


def frame(x0: float, title: str, columns: int, rows: int) -> None:
    """Writes a title over a matrix, and the names of its rows."""
    axes.text(x0 + columns / 2, 1.0, title, ha="center", va="bottom")
    for i in range(rows):
        if rows == L:
            axes.text(x0 - 0.15, -i - 0.5, f"$q_{i}$", ha="right", va="center")


figure, axes = plt.subplots(figsize=(7.6, 2.9))
blank(axes)

# One product with the distances, in decreasing order: column c holds R - 1 - c.
frame(0, "1. by distance:\none product", R, L)
for i in range(L):
    for c in range(R):
        distance = R - 1 - c
        face, ink = shade(distance)
        cell(axes, c, i, str(distance), face, ink=ink)

# A column of padding in front.
x1 = R + 2
frame(x1, "2. a column\nof padding", R + 1, L)
flat: list[tuple[str, str, str]] = []
for i in range(L):
    for c in range(R + 1):
        distance = R - c
        if c == 0:
            text, face, ink = "", GRID, INK
        else:
            face, ink = shade(distance)
            text = str(distance)
        flat.append((text, face, ink))
        cell(axes, x1 + c, i, text, face, ink=ink)

# The same numbers in rows of L, the first row dropped, are rows of K again.
x2 = x1 + R + 3
axes.text(x2 + L / 2, 1.0, "3. read in\nrows of L", ha="center", va="bottom")
for n, (text, face, ink) in enumerate(flat):
    row, column = divmod(n, L)
    cell(axes, x2 + column, row, text, face, ink=ink)
axes.plot([x2 - 0.1, x2 + L + 0.1], [-0.5, -0.5], color=INK, linewidth=1.1)
axes.text(x2 + L + 0.2, -0.5, "drop", va="center", fontsize=8)

x3 = x2 + L + 3
frame(x3, "4. by key: i sees\nits own, i + M, and older", K, L)
kept = flat[L:]
for n, (text, face, ink) in enumerate(kept):
    i, j = divmod(n, K)
    future = j > i + M
    if future:
        cell(axes, x3 + j, i, text, PALE, ink=MUTED)
    else:
        cell(axes, x3 + j, i, text, face, ink=ink)
for j in range(K):
    name = f"$k_{j}$"
    axes.text(x3 + j + 0.5, 0.15, name, ha="center", va="bottom", fontsize=8)
axes.text(
    x3 + K / 2, -L - 0.3, "grey: the future, masked", ha="center", va="top", fontsize=8
)
axes.set_xlim(-0.8, x3 + K + 0.6)
axes.set_ylim(-R - 1.2, 2.9)
save(figure, __file__)
