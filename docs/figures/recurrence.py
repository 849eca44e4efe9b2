"""What one token can see: two layers, three segments (section 3.2)."""

import matplotlib.pyplot as plt
from style import BLUE, INK, MUTED, ORANGE, PALE, SAND, SKY, blank, save

L = M = 4
SEGMENTS = 3
NAMES = ("embeddings", "layer 1", "layer 2")
LAST = SEGMENTS * L - 1

figure, axes = plt.subplots(figsize=(7.4, 3.1))
blank(axes)
for s in range(SEGMENTS):
    newest = s == SEGMENTS - 1
    face = SKY if newest else PALE
    axes.add_patch(
        plt.Rectangle((s * L - 0.45, -0.55), L - 0.1, 5.1, facecolor=face, zorder=0)
    )
    name = "segment being read" if newest else f"memory, {SEGMENTS - 1 - s} back"
    axes.text(s * L + L / 2 - 0.5, 4.75, name, ha="center", va="bottom", color=INK)

# From the newest token of the top layer, back through what each layer attended to.
frontier = {LAST}
for n in (2, 1):
    reached = set()
    for i in sorted(frontier):
        first = max(i // L * L - M, 0)
        for j in range(first, i + 1):
            old = j // L != i // L
            axes.plot(
                [i, j],
                [2 * n, 2 * n - 2],
                color=ORANGE if old else BLUE,
                linewidth=0.7,
                alpha=0.75,
                zorder=1,
            )
            reached.add(j)
    frontier = reached
for n, name in enumerate(NAMES):
    axes.text(-0.9, 2 * n, name, ha="right", va="center", color=INK)
    for i in range(SEGMENTS * L):
        first = LAST - (3 - n) * L
        seen = n == 0 or (n == 1 and i > first) or i == LAST
        axes.scatter(
            i,
            2 * n,
            s=58,
            zorder=2,
            edgecolor=INK if seen else MUTED,
            facecolor=("white" if i // L == SEGMENTS - 1 else SAND)
            if seen
            else "white",
            linewidth=0.9,
        )
for s in (1, 2):
    axes.plot([s * L - 0.5] * 2, [-0.55, 4.55], color=MUTED, linestyle=":", zorder=1)
axes.text(
    5.5,
    -1.0,
    "dotted: no gradient flows back across; orange: read from the memory",
    ha="center",
    va="top",
    color=INK,
)
save(figure, __file__)
