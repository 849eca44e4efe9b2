"""Tiles cover little more than the visible scores, and fit the chips."""

import pytest

from tests.support.refusal import refused
from txl_jax.kernels.tpu.blocks import VMEM, choose, vmem_bytes

# L, M, A, and the largest number of computed scores for each visible one.
PUBLISHED = [
    (150, 150, 41, 1.9),  # WikiText-103, base
    (384, 384, 64, 1.2),  # WikiText-103, large
    (512, 512, 64, 1.1),  # enwik8, base
    (768, 768, 128, 1.2),  # enwik8, large
    (64, 640, 41, 2.3),  # evaluation
    (128, 3800, 64, 1.1),
    (4096, 4096, 64, 1.1),
    (1, 512, 64, 160),  # 128 lanes for one query
]


@pytest.mark.parametrize(("L", "M", "A", "waste"), PUBLISHED)
def test_published_sizes_waste_little(L: int, M: int, A: int, waste: float) -> None:
    for kind, vmem in VMEM.items():
        blocks = choose(kind, L, M + L, A)
        visible = L * M + L * (L + 1) // 2
        assert blocks.scores() <= waste * visible
        assert vmem_bytes(blocks, A, 2) <= blocks.vmem <= vmem


def test_unsuited_chips_are_refused() -> None:
    with refused('model.kernel "chunked"'):
        choose("TPU v5p", 8192, 65536, 128)
    with refused("'TPU v4'.*TPU v6e"):
        choose("TPU v4", 8, 16, 64)
