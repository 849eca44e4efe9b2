"""Three texts of unequal length in two streams, read in two calls."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
from style import BLUE, GRID, MINT, MUTED, SAND, SKY, blank, cell, save

from txl_jax.model.interval import count_filled

L, M = 4, 12
ROWS = ("aaaaaaa ", "bbcccccc")
FACES = {"a": SKY, "b": SAND, "c": MINT, " ": GRID}

figure, axes = plt.subplots(figsize=(7.2, 1.5))
blank(axes)
filled_B = jnp.zeros(2, jnp.int32)
for call, x0 in enumerate((0.0, 9.4)):
    axes.text(x0 + L / 2, 0.25, f"call {call + 1}", ha="center", va="bottom")
    parts = [row[call * L :][:L] for row in ROWS]
    length_B = [len(part.rstrip()) for part in parts]
    first_BL = []
    for b, (row, part) in enumerate(zip(ROWS, parts, strict=True)):
        if not call:
            axes.text(x0 - 0.3, -b - 0.5, f"stream {b}", ha="right", va="center")
        first_BL.append([])
        for column, text in enumerate(part):
            at = call * L + column
            number = at - row.index(text)
            label = f"${text}_{number}$" if text.strip() else ""
            cell(axes, x0 + column, b, label, FACES[text])
            first_BL[-1].append(bool(text.strip()) and number == 0)
            if first_BL[-1][-1]:
                axes.plot([x0 + column + 0.05] * 2, [-b, -b - 1], color=BLUE, lw=2.6)
    filled_B = count_filled(filled_B, M, jnp.array(length_B), jnp.array(first_BL))
    for x, name, numbers in (
        (1.0, "length_B", length_B),
        (3.0, "filled_B\nafter it", filled_B.tolist()),
    ):
        style = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": MUTED}
        axes.text(x0 + L + x, 0.25, name, **style)
        for b, number in enumerate(numbers):
            axes.text(x0 + L + x, -b - 0.5, str(number), ha="center", va="center")
assert filled_B.tolist() == [7, 6]
axes.set_xlim(-2.2, 17.8)
axes.set_ylim(-2.1, 1.3)
save(figure, __file__)
