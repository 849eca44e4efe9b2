"""Tiles cover what is visible, little more, and fit the chips.

Dims: B streams, L queries, M memory, K = M + L keys.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.errors import UserError
from txl_jax.kernels.tpu.blocks import VMEM, Blocks, choose, vmem_bytes
from txl_jax.kernels.tpu.tiles import visits

# L, M, A, and how many scores may be computed for one that is visible.
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
def test_published_sizes_fit_and_waste_little(
    L: int, M: int, A: int, waste: float
) -> None:
    for kind, vmem in VMEM.items():
        blocks = choose(kind, L, M + L, A)
        visible = L * M + L * (L + 1) // 2
        assert blocks.scores() <= waste * visible
        assert vmem_bytes(blocks, A, 2) <= blocks.vmem <= vmem


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("TPU v4", (8192, 16384, 128), 'model.kernel "chunked"'),
        ("TPU v3", (8, 16, 64), "'TPU v3'.*TPU v6e"),
    ],
)
def test_unsuited_chips_are_refused(
    kind: str, sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(kind, *sizes)


@pytest.mark.parametrize(("L", "M", "tile"), [(40, 50, 16), (30, 300, 112)])
def test_visits_are_the_tiles_that_are_visible(L: int, M: int, tile: int) -> None:
    blocks = Blocks(L, M + L, tile, 128)
    rng = np.random.default_rng(0)
    oldest_BL = rng.integers(0, np.arange(L) + M + 1, (4, L))
    oldest_BL[1] = 0
    oldest_BL[2] = np.arange(L) + M
    plan, _ = visits(jnp.asarray(oldest_BL), blocks)
    key_K = np.arange(blocks.key_tiles * tile) - blocks.hidden_keys
    padded_Q = np.arange(blocks.query_tiles * tile) - blocks.hidden_queries
    for b, i in np.ndindex(4, blocks.query_tiles):
        query_T = padded_Q[i * tile : (i + 1) * tile]
        query_T = query_T[query_T >= 0]
        seen = key_K >= oldest_BL[b, query_T, None]
        seen &= key_K <= query_T[:, None] + M
        by_tile = seen.reshape(len(query_T), -1, tile)
        diagonal = blocks.diagonal(i)
        deepest = diagonal - np.flatnonzero(by_tile.any((0, 2))).min()
        at = b * blocks.query_tiles + i
        assert plan.deepest_BI[at] == deepest
        for d in range(1, deepest + 1):
            whole = by_tile[:, diagonal - d].all()
            assert (d <= plan.clear_BI[at]) == whole
