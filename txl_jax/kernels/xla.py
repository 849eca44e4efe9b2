"""Relative attention by einsum: the oracle that every other kernel is tested against.

The score of query i and key j is the paper's four terms (section 3.3),

    (q_i + u) . k_j  +  (q_i + w) . r_{i-j}

where w is the paper's v (its letter is the values' here). Computed for every distance
and re-indexed from distance to key by `rel_shift`, the second half costs one product.

Dims: B streams, L queries, M memory, K = M + L keys, R = K distances, Z = R + 1 or
more, H heads, A head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Far below any score, and finite, so that a row never becomes NaN.
MASKED = -1e30


class Dropout(NamedTuple):
    """Dropout of the attention's probabilities, by a counter.

    The keep bit is a function of the seed and of the global stream, head, query and
    key, so that it depends on neither the blocks of a kernel nor the mesh.
    """

    rate: float
    seed: Array  # uint32
    stream0: Array | int = 0  # global index of the first stream here
    head0: Array | int = 0  # global index of the first head here


def mix(x: Array) -> Array:
    """Scrambles uint32: MurmurHash3's finaliser (Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


STEP = 0x9E3779B9  # of a counter, from one index to the next


def survives(rate: float, counter: Array) -> Array:
    """Returns which values of a counter survive dropout, bool."""
    return mix(counter) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def kept(rate: float, start: Array, index: Array) -> Array:
    """Returns which indices of a counter survive dropout, bool, all in uint32."""
    return survives(rate, start + index * jnp.uint32(STEP))


def keep_BHLK(dropout: Dropout, shape: tuple[int, int, int, int]) -> Array:
    """Returns which probabilities survive dropout, bool.

    A row (stream, head, query) starts a counter at mix(mix(mix(seed ^ stream) ^ head)
    ^ query); key j is kept where mix(start + j * 0x9E3779B9) >= rate * 2^32.
    """
    stream_B, head_H, query_L, key_K = (
        jnp.arange(size, dtype=jnp.uint32) for size in shape
    )
    stream_B += jnp.uint32(dropout.stream0)
    head_H += jnp.uint32(dropout.head0)
    start_BH = mix(mix(dropout.seed ^ stream_B)[:, None] ^ head_H)
    start_BHL = mix(start_BH[..., None] ^ query_L)
    return kept(dropout.rate, start_BHL[..., None], key_K)


def rel_shift(x_HBLR: Array) -> Array:
    """Re-indexes scores from distance to key.

    Input column c holds distance R - 1 - c; output column j of row i holds distance
    i + M - j. Columns j > i + M (the future) hold garbage: mask them.

    One column of padding makes a row one longer than a row of keys, so that reading
    the same numbers as rows of K shifts row i by L - 1 - i (Appendix B).
    """
    return read_on(in_front(x_HBLR, 1))


def in_front(x_HBLR: Array, columns: int) -> Array:
    """Returns x with so many columns of zeros before its own."""
    return jnp.pad(x_HBLR, ((0, 0), (0, 0), (0, 0), (columns, 0)))


def read_on(x_HBLZ: Array) -> Array:
    """Returns rows of R = Z - 1, those of Z read on and on: see `rel_shift`."""
    H, B, L, Z = x_HBLZ.shape
    return x_HBLZ.reshape(H, B, Z, L)[:, :, 1:].reshape(H, B, L, Z - 1)


def visible_BLK(oldest_BL: Array, K: int) -> Array:
    """Returns the interval of keys that each query sees: oldest <= j <= i + M."""
    L = oldest_BL.shape[1]
    key_K = jnp.arange(K)
    newest_L = jnp.arange(L) + (K - L)
    return (key_K >= oldest_BL[..., None]) & (key_K <= newest_L[:, None])


def with_bias(q_BLHA: Array, bias_HA: Array | None) -> Array:
    """Returns queries with u or w added, in the queries' dtype.

    Added in float32, so that the gradient by the bias is: a sum over all streams and
    queries in bfloat16 is wrong by several percent.
    """
    if bias_HA is None:
        return q_BLHA
    f32 = jnp.float32
    return (q_BLHA.astype(f32) + bias_HA.astype(f32)).astype(q_BLHA.dtype)


def rel_attention(
    q_BLHA: Array,
    k_BKHA: Array,
    v_BKHA: Array,
    r_RHA: Array | None,
    u_HA: Array | None,
    w_HA: Array | None,
    bias_HR: Array | None,
    oldest_BL: Array,
    dropout: Dropout | None,
) -> Array:
    """Returns o_BLHA, the attention of each query over the keys that it sees.

    The result has the queries' dtype; for the rest see `probabilities`.
    """
    B, L, H, _ = q_BLHA.shape
    K = k_BKHA.shape[1]
    v_HBKA = heads_first(v_BKHA)
    weight_HBLK = probabilities(q_BLHA, k_BKHA, r_RHA, u_HA, w_HA, bias_HR, oldest_BL)
    if dropout is not None:
        keep_HBLK = jnp.swapaxes(keep_BHLK(dropout, (B, H, L, K)), 0, 1)
        weight_HBLK = jnp.where(keep_HBLK, weight_HBLK / (1 - dropout.rate), 0)
    o_HBLA = jnp.einsum("HBLK,HBKA->HBLA", weight_HBLK.astype(v_HBKA.dtype), v_HBKA)
    return o_HBLA.transpose(1, 2, 0, 3)


def probabilities(
    q_BLHA: Array,
    k_BKHA: Array,
    r_RHA: Array | None,
    u_HA: Array | None,
    w_HA: Array | None,
    bias_HR: Array | None,
    oldest_BL: Array,
) -> Array:
    """Returns what each query gives to each key, [H, B, L, K] in float32.

    r_RHA and bias_HR are ordered from the greatest distance, R - 1, down to 0; keys
    farther than that, where R is less than K, have the first row. Scores are scaled by
    1 / sqrt(A); scores and softmax are float32. Without u_HA or w_HA their terms are
    left out; without r_RHA all that depends on distance is. Source: section 3.3; the
    reference scales all four terms.
    """
    _, L, _, A = q_BLHA.shape
    K = k_BKHA.shape[1]
    f32 = jnp.float32
    # Heads come first, so that r, which has no streams, is not copied for each of them
    # and no product as large as the scores has to be turned round.
    k_HBKA = heads_first(k_BKHA)
    content_HBLA = heads_first(with_bias(q_BLHA, u_HA))
    score_HBLK = jnp.einsum(
        "HBLA,HBKA->HBLK", content_HBLA, k_HBKA, preferred_element_type=f32
    )
    if r_RHA is not None:
        R, r_HRA = r_RHA.shape[0], jnp.swapaxes(r_RHA, 0, 1)
        if R < K:
            # All that a softmax sees is differences: those from the farthest distance,
            # which many keys share, are 0 for them all.
            r_HRA -= r_HRA[:, :1]
            bias_HR = None if bias_HR is None else bias_HR - bias_HR[:, :1]
        # The keys that are less than R from some query. Columns of zeros are for the
        # greater distances that they have, and the one that `rel_shift` puts in front:
        # where they are few, rows of zeros make them, instead of a copy of all scores.
        near = min(K, R + L - 1)
        zeros = near - R + 1
        rows = zeros if 2 * zeros <= R else 0
        r_HZA = jnp.pad(r_HRA, ((0, 0), (rows, 0), (0, 0)))
        position_HBLA = heads_first(with_bias(q_BLHA, w_HA))
        position_HBLZ = jnp.einsum(
            "HBLA,HZA->HBLZ", position_HBLA, r_HZA, preferred_element_type=f32
        )
        if bias_HR is not None:
            bias_HZ = jnp.pad(bias_HR, ((0, 0), (rows, 0)))
            position_HBLZ += bias_HZ[:, None, None].astype(f32)
        position_HBLZ = in_front(position_HBLZ, zeros - rows)
        score_HBLK = score_HBLK.at[..., K - near :].add(read_on(position_HBLZ))
    score_HBLK *= A**-0.5
    score_HBLK = jnp.where(visible_BLK(oldest_BL, K), score_HBLK, MASKED)
    return jax.nn.softmax(score_HBLK, axis=-1)


def heads_first(x_BLHA: Array) -> Array:
    """Returns x_HBLA."""
    return x_BLHA.transpose(2, 0, 1, 3)


def every_distance(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a kernel that wants R = K rows as one that takes fewer, as here."""

    @functools.wraps(kernel)
    def call(
        q_BLHA: Array,
        k_BKHA: Array,
        v_BKHA: Array,
        r_RHA: Array | None,
        u_HA: Array | None,
        w_HA: Array | None,
        bias_HR: Array | None,
        *rest: Any,
    ) -> Array:
        if r_RHA is not None and (missing := k_BKHA.shape[1] - r_RHA.shape[0]):
            r_RHA = jnp.pad(r_RHA, ((missing, 0), (0, 0), (0, 0)), "edge")
            if bias_HR is not None:
                bias_HR = jnp.pad(bias_HR, ((0, 0), (missing, 0)), "edge")
        return kernel(q_BLHA, k_BKHA, v_BKHA, r_RHA, u_HA, w_HA, bias_HR, *rest)

    return call
