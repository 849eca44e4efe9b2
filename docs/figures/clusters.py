"""The two ends of the vocabulary: clusters of `wt103_large` (div_val 4)."""

import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREEN, INK, MUTED, ORANGE, RED, save

from txl_jax import config
from txl_jax.data.catalog import CORPORA
from txl_jax.kernels.softmax import zipf

V = CORPORA["wikitext103"].vocab_size
model = config.load("wt103_large").model
ends = (0, *model.cutoffs, V)
COLOURS = (BLUE, GREEN, ORANGE, RED)

figure, axes = plt.subplots(figsize=(6.2, 2.5))
parts = zipf(V, model.cutoffs)
for i, (low, high) in enumerate(zip(ends, ends[1:], strict=False)):
    E = model.embed_sizes[i]
    rank = np.geomspace(max(low, 1), high, 60)
    axes.fill_between(rank, 8, E, step=None, color=COLOURS[i], alpha=0.85, linewidth=0)
    middle = np.sqrt(max(low, 1) * high) if i == 0 else (low + high) / 2
    text = f"{E:,} features\n{100 * parts[i]:.0f} % of tokens"
    if i == 0:
        axes.text(middle, 95, text, ha="center", va="center", color="white")
axes.set_xscale("log")
axes.set_yscale("log", base=2)
axes.set_xlim(1, V * 1.02)
axes.set_ylim(8, 2048)
axes.set_yticks([16, 64, 256, 1024], ["16", "64", "256", "1,024"])
axes.set_xlabel("rank of a word, the commonest first")
axes.set_ylabel("size of its embedding")
for spine in ("top", "right"):
    axes.spines[spine].set_visible(False)
for i in (1, 2, 3):
    low, high = ends[i], ends[i + 1]
    E = model.embed_sizes[i]
    at = np.sqrt(low * high)
    axes.annotate(
        f"{E}: {100 * parts[i]:.0f} %",
        xy=(at, E),
        xytext=(V * 1.6, E * 1.0),
        va="center",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.7},
        annotation_clip=False,
    )
save(figure, __file__)
