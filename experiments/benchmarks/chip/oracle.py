"""Relative attention and its gradients in numpy and float64, written from the paper.

Section 3.3, one stream and one head at a time, without anything of the package.

Dims: R <= K distances.
"""

from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Dropout(NamedTuple):
    """The dropout of probabilities, as `txl_jax.kernels.hash.AttentionDropout`."""

    rate: float
    seed: int
    stream0: int = 0
    head0: int = 0


def murmur3(x: np.ndarray) -> np.ndarray:
    """Scrambles uint32: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def kept(dropout: Dropout | None, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the factor of each probability, 0 or 1 / (1 - rate).

    Its bit is a hash of the seed and the stream, head, query and key.
    """
    if dropout is None:
        return np.ones(shape)
    stream_B, head_H, query_L, key_K = (np.arange(n, dtype=np.uint32) for n in shape)
    stream_B, head_H = stream_B + dropout.stream0, head_H + dropout.head0
    start_BH = murmur3(murmur3(stream_B ^ dropout.seed)[:, None] ^ head_H)
    start_BHL = murmur3(start_BH[..., None] ^ query_L)
    hash_BHLK = murmur3(start_BHL[..., None] + key_K * np.uint32(0x9E3779B9))
    return (hash_BHLK >= int(dropout.rate * 2**32)) / (1 - dropout.rate)


def differentiate(
    inputs: Arrays, do_BLHA: np.ndarray, dropout: Dropout | None
) -> Arrays:
    """Returns the output "o" and the gradients of sum(o * do), by the inputs' names.

    inputs: q_BLHA, k_BKHA, v_BKHA and oldest_BL, and those of r_RHA, u_HA, w_HA and
    bias_HR that a score has. Distances are from the greatest down.
    """
    x = {name.partition("_")[0]: np.asarray(x) for name, x in inputs.items()}
    (B, L, H, A), K = x["q"].shape, x["k"].shape[1]
    R = len(x["r"]) if "r" in x else x["bias"].shape[1] if "bias" in x else K
    absent = {"r": (R, H, A), "u": (H, A), "w": (H, A), "bias": (H, R)}
    terms = {name: np.zeros(shape) for name, shape in absent.items()} | x
    factor_BHLK = kept(dropout, (B, H, L, K))
    result = {name: np.zeros(each.shape) for name, each in terms.items()}
    result["o"] = np.zeros((B, L, H, A))
    for b in range(B):
        for h in range(H):
            one = (x["q"][b, :, h], x["k"][b, :, h], x["v"][b, :, h])
            shared = (terms["r"][:, h], terms["u"][h], terms["w"][h], terms["bias"][h])
            upstream = do_BLHA[b, :, h], factor_BHLK[b, h]
            # An index is below 2^53, so float64 is exact.
            arrays = (*one, *shared, *upstream, x["oldest"][b])
            o_LA, grads = one_head(*(each.astype(np.float64) for each in arrays))
            result["o"][b, :, h] = o_LA
            for name, grad in zip("qkv", grads[:3], strict=True):
                result[name][b, :, h] = grad
            result["r"][:, h] += grads[3]
            for name, grad in zip(("u", "w", "bias"), grads[4:], strict=True):
                result[name][h] += grad
    return {name: result[name] for name in ["o", *x] if name != "oldest"}


def one_head(
    q_LA: np.ndarray,
    k_KA: np.ndarray,
    v_KA: np.ndarray,
    r_RA: np.ndarray,
    u_A: np.ndarray,
    w_A: np.ndarray,
    bias_R: np.ndarray,
    do_LA: np.ndarray,
    factor_LK: np.ndarray,
    oldest_L: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Returns the output of a head, and the gradients of its first seven arguments."""
    (L, A), K, R = q_LA.shape, len(k_KA), len(r_RA)
    i_L1, j_K = np.arange(L)[:, None] + K - L, np.arange(K)
    distance_LK = np.clip(i_L1 - j_K, 0, R - 1)  # farther ones count as the farthest
    row_LK = R - 1 - distance_LK
    content_LA, position_LA = q_LA + u_A, q_LA + w_A
    score_LK = content_LA @ k_KA.T
    position_LR = position_LA @ r_RA.T + bias_R
    score_LK += np.take_along_axis(position_LR, row_LK, axis=1)
    visible_LK = (j_K >= oldest_L[:, None]) & (j_K <= i_L1)
    score_LK = np.where(visible_LK, score_LK / np.sqrt(A), -np.inf)
    weight_LK = np.exp(score_LK - score_LK.max(axis=1, keepdims=True))
    weight_LK /= weight_LK.sum(axis=1, keepdims=True)
    o_LA = (weight_LK * factor_LK) @ v_KA

    dv_KA = (weight_LK * factor_LK).T @ do_LA
    dweight_LK = (do_LA @ v_KA.T) * factor_LK
    mean_L1 = (weight_LK * dweight_LK).sum(axis=1, keepdims=True)
    dscore_LK = weight_LK * (dweight_LK - mean_L1) / np.sqrt(A)
    place_LK = np.arange(L)[:, None] * R + row_LK
    dscore_LR = np.bincount(place_LK.ravel(), dscore_LK.ravel(), L * R).reshape(L, R)
    dcontent_LA, dposition_LA = dscore_LK @ k_KA, dscore_LR @ r_RA
    return o_LA, (
        dcontent_LA + dposition_LA,
        dscore_LK.T @ content_LA,
        dv_KA,
        dscore_LR.T @ position_LA,
        dcontent_LA.sum(axis=0),
        dposition_LA.sum(axis=0),
        dscore_LR.sum(axis=0),
    )
