"""The order of the TPU kernels' tiles: from the diagonal back, one distance a step."""

import matplotlib.pyplot as plt
from style import INK, MUTED, PALE, blank, save

from txl_jax.kernels.tpu.blocks import make_blocks

T, L, M = 4, 12, 9
blocks = make_blocks(L, L + M, T, columns=128)
SHADES = ("#1f5a99", "#4176b0", "#6595c8", "#8db3db", "#b7d1ec", "#dfebf7")

figure, axes = plt.subplots(figsize=(7.4, 3.4))
blank(axes)
nq, nk = blocks.query_tiles, blocks.key_tiles
for i in range(nq):
    for j in range(nk):
        d = blocks.diagonal(i) - j
        for y in range(T):
            query = i * T + y - blocks.hidden_queries
            seen = query + M + blocks.hidden_keys - j * T + 1  # keys in this tile
            padded = T if query < 0 else max(blocks.hidden_keys - j * T, 0)
            for face, keys in (
                (SHADES[max(d, 0)], min(max(seen, 0), T)),
                (PALE, padded),
            ):
                if keys:
                    axes.add_patch(
                        plt.Rectangle(
                            (j * T, -(i * T + y) - 1), keys, 1, facecolor=face
                        )
                    )
        axes.add_patch(
            plt.Rectangle(
                (j * T, -(i + 1) * T),
                T,
                T,
                facecolor="none",
                edgecolor=INK if d >= 0 else MUTED,
                linewidth=1.1 if d >= 0 else 0.6,
                linestyle="-" if d >= 0 else ":",
            )
        )
        ink, text = (MUTED, "skipped") if d < 0 else (INK, f"d = {d}")
        if 0 <= d < 3:
            ink = "white"
        x, y = (0.33, 0.75) if d == 0 else (0.5, 0.5)
        axes.text((j + x) * T, -(i + y) * T, text, ha="center", va="center", color=ink)
for i in range(nq):
    axes.text(
        -0.4, -(i + 0.5) * T, f"query tile {i}", ha="right", va="center", fontsize=8
    )
for j in range(nk):
    axes.text((j + 0.5) * T, 0.3, f"key tile {j}", ha="center", va="bottom", fontsize=8)
axes.text(
    nk * T / 2,
    -nq * T - 0.5,
    "one shade: the same tile of distances, nk - 1 - d; grey: padding, in front",
    ha="center",
    va="top",
    fontsize=8,
)
axes.set_xlim(-5.5, nk * T + 0.5)
axes.set_ylim(-nq * T - 1.8, 1.6)
save(figure, __file__)
