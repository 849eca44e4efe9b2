"""A second oracle: sinusoids of distances are products of rotations (section 3.3).

With s and c the halves of W_R^T q, and f the frequencies, q W_R R_{i-j} is

    sum of  (c sin(i f) - s cos(i f)) sin(j f) + (s sin(i f) + c cos(i f)) cos(j f),

a plain product of something at i and the sinusoid at j, without any re-indexing. It
holds while no distance is clamped.

Dims: B streams, L queries, M memory, K = M + L keys, R = K distances, D model, H heads,
A head.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels import chunked, xla
from txl_jax.kernels.tiles import Blocks
from txl_jax.model.positions import sinusoid_RD

B, H, D, A = 2, 2, 6, 4
KERNELS: dict[str, Any] = {
    "xla": xla.rel_attention,
    "chunked": functools.partial(chunked.rel_attention, blocks=Blocks(4, 8)),
}


def rotated_attention(
    q_BLHA: Array, k_BKHA: Array, v_BKHA: Array, r_DHA: Array, u_HA: Array, w_HA: Array
) -> Array:
    """Returns o_BLHA in float64, from the sinusoids of places alone."""
    L, K = q_BLHA.shape[1], k_BKHA.shape[1]
    frequency = 10_000.0 ** (-np.arange(0, D, 2) / D)
    angle_K = np.arange(K)[:, None] * frequency
    sin_K, cos_K = np.sin(angle_K), np.cos(angle_K)
    sin_L, cos_L = (x[-L:, None] for x in (sin_K, cos_K))
    y_BLHD = np.einsum("BLHA,DHA->BLHD", q_BLHA + w_HA, r_DHA)
    s, c = np.split(y_BLHD, 2, axis=-1)
    rotated_BLHD = np.concatenate([c * sin_L - s * cos_L, s * sin_L + c * cos_L], -1)
    place_KD = np.concatenate([sin_K, cos_K], axis=-1)
    score_BHLK = np.einsum("BLHA,BKHA->BHLK", q_BLHA + u_HA, k_BKHA)
    score_BHLK += np.einsum("BLHD,KD->BHLK", rotated_BLHD, place_KD)
    past_LK = np.tri(L, K, K - L, dtype=bool)
    weight_BHLK = np.where(past_LK, np.exp(score_BHLK / np.sqrt(A)), 0)
    weight_BHLK /= weight_BHLK.sum(axis=-1, keepdims=True)
    return np.einsum("BHLK,BKHA->BLHA", weight_BHLK, v_BKHA)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("L", "M"), [(1, 9), (9, 13)])
def test_the_kernel_is_attention_to_rotated_places(kernel: str, L: int, M: int) -> None:
    rng = np.random.default_rng(0)
    K = M + L
    shapes = [(B, L, H, A), (B, K, H, A), (B, K, H, A), (D, H, A), (H, A), (H, A)]
    q, k, v, r_DHA, u, w = (rng.normal(size=shape) for shape in shapes)
    R_RD = np.asarray(sinusoid_RD(np.arange(K - 1, -1, -1), D), np.float64)  # type: ignore
    r_RHA = np.einsum("RD,DHA->RHA", R_RD, r_DHA)
    floats = [x.astype(np.float32) for x in (q, k, v, r_RHA, u, w)]
    oldest_BL = np.zeros((B, L), np.int32)

    def run(*floats: jax.Array) -> jax.Array:
        return KERNELS[kernel](*floats, None, oldest_BL, None)

    expected = rotated_attention(q, k, v, r_DHA, u, w)
    tiny.assert_close(tiny.jit(run)(*floats), expected)
