"""The shift inside a tile of the TPU kernels: merge, then roll each column."""

import matplotlib.pyplot as plt
from style import INK, MUTED, PALE, blank, cell, save

T = 4
NEAR = ("#1f5a99", "#4d86bf", "#84aedb", "#b7d1ec")
FAR = ("#b86a1c", "#d9924b", "#ecb984", "#f8dfc4")


def draw(x0: float, title: str, rows: list[list[str]], greyed: bool = False) -> None:
    """Draws a tile: names such as n0 and f3 choose the colours."""
    axes.text(x0 + T / 2, 0.35, title, ha="center", va="bottom")
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            colours, number = (NEAR if name[0] == "n" else FAR), int(name[1])
            ink = "white" if number < 2 else INK
            face = colours[number]
            if greyed and y > x:
                face, ink = PALE, MUTED
            cell(axes, x0 + x, y, name, face, ink=ink)


def skewed(columns: list[list[str]]) -> list[list[str]]:
    """Rolls column x down by x + 1 rows."""
    rolled = [
        [column[(y - x - 1) % T] for y in range(T)] for x, column in enumerate(columns)
    ]
    return [[rolled[x][y] for x in range(T)] for y in range(T)]


near = [[f"n{y}"] * T for y in range(T)]
far = [[f"f{y}"] * T for y in range(T)]
# Column x has the last x + 1 rows of `near`; its other rows come from `far`.
merged = [[f"n{y}" if y >= T - 1 - x else f"f{y}" for x in range(T)] for y in range(T)]
columns = [[merged[y][x] for y in range(T)] for x in range(T)]
result = skewed(columns)
diagonal = skewed([[f"n{y}" for y in range(T)] for _ in range(T)])
# Row y of column x is x - y apart: from `near`'s last row, distance 0, upwards.
assert [result[y][y] for y in range(T)] == [f"n{T - 1}"] * T
assert result[T - 1][0] == f"f{T - 2}"

figure, axes = plt.subplots(figsize=(7.6, 2.0))
blank(axes)
draw(0, "near", near)
draw(T + 0.7, "far, carried over", far)
draw(2 * T + 2.2, "merged", merged)
draw(3 * T + 3.7, "skewed: rows are keys", result)
draw(4 * T + 5.6, "on the diagonal", diagonal, greyed=True)
for x in (2 * T + 1.45, 3 * T + 2.95):
    axes.annotate(
        "",
        xy=(x + 0.5, -T / 2),
        xytext=(x - 0.5, -T / 2),
        arrowprops={"arrowstyle": "->", "color": INK},
    )
axes.text(-0.3, -T / 2, "distances", rotation=90, ha="right", va="center", fontsize=8)
axes.text(T / 2, -T - 0.25, "queries", ha="center", va="top", fontsize=8)
axes.text(
    4 * T + 5.6 + T / 2,
    -T - 0.25,
    "grey: the future",
    ha="center",
    va="top",
    fontsize=8,
)
axes.set_xlim(-1.2, 5 * T + 6.2)
axes.set_ylim(-T - 1.1, 1.3)
save(figure, __file__)
