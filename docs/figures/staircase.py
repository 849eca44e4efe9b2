"""Three segments in one call: the oldest visible key rises at each boundary."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from intervals import draw
from style import INK, save

from txl_jax.model.interval import find_oldest

S, L, M = 3, 4, 6
T = S * L

figure, axes = plt.subplots(figsize=(5.2, 3.7))
oldest_BT = find_oldest(jnp.array([M]), jnp.zeros((1, T), bool), M, T, 0, segment_len=L)
draw(axes, np.asarray(oldest_BT[0]), M)
for s in range(S):
    alone_BL = find_oldest(jnp.array([M]), jnp.zeros((1, L), bool), M, L, 0)
    np.testing.assert_array_equal(oldest_BT[:, s * L : (s + 1) * L] - s * L, alone_BL)
    name = f"segment {s + 1}"
    center = (s + 0.5) * L
    axes.text(M + center, -T - 0.35, name, ha="center", va="top", fontsize=7.5)
    axes.text(-0.5, -center, name, rotation=90, ha="right", va="center", fontsize=7.5)
    axes.plot([-0.3, M + T], [-s * L] * 2, color=INK, linewidth=0.9, zorder=2)
save(figure, __file__)
