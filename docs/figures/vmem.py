"""What the backward TPU kernel holds in VMEM, as tpu_blocks adds it up."""

import matplotlib.pyplot as plt
from style import BLUE, GREEN, INK, MUTED, ORANGE, RED, SKY, save

from txl_jax.kernels.skew import LANES
from txl_jax.kernels.tpu.blocks import MIB, Blocks, choose, up, vmem_bytes

A, SIZE = 64, 2  # bfloat16
LENGTHS = (512, 1024, 2048, 4096, 8192)  # L = M
NAMES = (
    "k, v, r",
    "q, do, dq",
    "sums of dk, dv, dr",
    "products, weights",
    "a strip, the rest",
)
COLOURS = (SKY, BLUE, ORANGE, GREEN, MUTED)


def terms(blocks: Blocks) -> list[float]:
    """Returns the terms of `tpu_blocks.vmem_bytes`, whose comments name them."""
    a, s = up(A, 32 // SIZE), SIZE
    T, W, Z = blocks.tile, blocks.width, blocks.query_width
    parts = [
        7 * s * a * W,
        (8 * s + 8) * a * Z,
        (12 + 2 * s) * a * W * blocks.key_tiles,
        8 * T * Z + 3 * s * W * Z,
        24 * T * blocks.columns + 2 * MIB,
    ]
    assert sum(parts) == vmem_bytes(blocks, A, SIZE)
    return [part / MIB for part in parts]


figure, axes = plt.subplots(figsize=(6.4, 2.6))
for y, length in enumerate(LENGTHS):
    blocks = choose("TPU v5e", length, 2 * length, A, SIZE)
    left = 0.0
    for name, colour, part in zip(NAMES, COLOURS, terms(blocks), strict=True):
        axes.barh(
            y,
            part,
            left=left,
            color=colour,
            height=0.62,
            label=name if y == 0 else None,
        )
        left += part
    axes.text(left + 0.4, y, f"{left:.1f} MiB", va="center", fontsize=8)
axes.axvline(16, color=RED, linewidth=1)
axes.text(16.2, -0.75, "a kernel's share without asking", color=RED, fontsize=7.5)
axes.set_yticks(range(len(LENGTHS)), [f"L = M = {length:,}" for length in LENGTHS])
axes.invert_yaxis()
axes.set_xlabel("MiB of VMEM, a head of 64 in bfloat16, tiles of 512")
axes.set_xlim(0, 42)
axes.legend(loc="lower right", fontsize=7.5, frameon=False)
for spine in ("top", "right"):
    axes.spines[spine].set_visible(False)
axes.tick_params(axis="y", length=0, labelcolor=INK)
assert LANES == 128
save(figure, __file__)
