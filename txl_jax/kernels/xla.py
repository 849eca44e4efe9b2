"""Attention by einsum, the reference for all other kernels (section 3.3, Appendix B).

The paper's v is called w here, because v denotes the values. The terms of a score that
depend on the distance are computed by distance and re-indexed by key: see `realign`.

Dims: Z = R + padding, Y nearest keys.
"""

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.hash import keep_BHLK
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.kernels.product import float32_product, product

# Far below any score but finite, so that no row becomes NaN.
MASKED = -1e30
f32 = jnp.float32


def rel_attention(operands: Operands) -> Array:
    """Returns o_BLHA, relative attention for all heads of a layer (section 3.3).

    The score of query i and key j is

        ((q_i + u) . k_j + (q_i + w) . r_{i-j} + bias_{i-j}) / sqrt(A),

    and the output is the sum of the values weighted by the softmax of the scores.
    Scores and softmax are float32; the output has the dtype of the values.
    """
    dropout = operands.dropout
    weight_HBLK = probabilities(operands)
    if dropout is not None:
        H, B, L, K = weight_HBLK.shape
        keep_HBLK = jnp.swapaxes(keep_BHLK(dropout, (B, H, L, K)), 0, 1)
        weight_HBLK = jnp.where(keep_HBLK, weight_HBLK / (1 - dropout.rate), 0)
    v_HBKA = heads_first(operands.v_BKHA)
    weight_HBLK = weight_HBLK.astype(v_HBKA.dtype)
    o_HBLA = product("HBLK,HBKA->HBLA", weight_HBLK, v_HBKA)
    return o_HBLA.transpose(1, 2, 0, 3)


def probabilities(operands: Operands) -> Array:
    """Returns the attention probabilities before dropout, [H, B, L, K] in float32."""
    q_BLHA, k_BKHA, position = operands.q_BLHA, operands.k_BKHA, operands.position
    r_RHA, bias_HR = position.r_RHA, position.bias_HR
    K, A = k_BKHA.shape[1], k_BKHA.shape[3]
    # With heads first, r is not copied for each stream, and no product of the size of
    # the scores is transposed.
    content_HBLA = heads_first(with_bias(q_BLHA, position.u_HA))
    k_HBKA = heads_first(k_BKHA)
    score_HBLK = float32_product("HBLA,HBKA->HBLK", content_HBLA, k_HBKA)
    if r_RHA is not None or bias_HR is not None:
        position_HBLA = heads_first(with_bias(q_BLHA, position.w_HA))
        position_HBLY = position_scores(position_HBLA, r_RHA, bias_HR, K)
        far = K - position_HBLY.shape[-1]
        score_HBLK = score_HBLK.at[..., far:].add(position_HBLY)
    score_HBLK *= A**-0.5
    score_HBLK = jnp.where(visible_BLK(operands.oldest_BL, K), score_HBLK, MASKED)
    return jax.nn.softmax(score_HBLK, axis=-1)


def position_scores(
    q_HBLA: Array, r_RHA: Array | None, bias_HR: Array | None, K: int
) -> Array:
    """Returns q . r_{i-j} + bias_{i-j} for the Y newest of K keys, float32.

    If R < K, all older keys share the score of the farthest distance. It is subtracted
    from all scores, which leaves the softmax unchanged, so older keys need no score.
    Without r_RHA the scores are the same for all streams, position_H1LY.
    """
    L = q_HBLA.shape[2]
    r_HRA = None if r_RHA is None else jnp.swapaxes(r_RHA, 0, 1)
    R = jax.tree.leaves((r_HRA, bias_HR))[0].shape[1]
    if R < K:
        r_HRA, bias_HR = jax.tree.map(lambda x: minus_farthest(x, 1), (r_HRA, bias_HR))
    # Only the Y newest keys are nearer than R to some query; usually all are, R = K,
    # and one row of zeros is added. In general, Y - R + 1 columns of zeros
    # come before the R: one that `realign` drops, and the distances from R on. If they
    # are few, they are rows of zeros in r, because padding the scores copies them.
    Y = min(K, R + L - 1)
    zeros = Y - R + 1
    rows = zeros if 2 * zeros <= R else 0
    score_HBLZ = jnp.zeros((q_HBLA.shape[0], 1, L, R + rows), f32)
    if r_HRA is not None:
        r_HZA = pad_front(r_HRA, rows, axis=1)
        score_HBLZ = float32_product("HBLA,HZA->HBLZ", q_HBLA, r_HZA)
    if bias_HR is not None:
        score_HBLZ += pad_front(bias_HR, rows)[:, None, None].astype(f32)
    return realign(pad_front(score_HBLZ, zeros - rows))


def minus_farthest(x: Array, axis: int) -> Array:
    """Returns terms relative to the first along an axis of distances.

    In float32, in which the gradient of the farthest distance is summed.
    """
    farthest = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
    return (x.astype(f32) - farthest.astype(f32)).astype(x.dtype)


def realign(x_HBLZ: Array) -> Array:
    """Re-indexes scores from distance to key: element (i, j) is (i, j + L - i) of x.

    Column c of x holds distance Z - 1 - c. The elements keep their order in memory, and
    only the length of a row changes (Appendix B). Past the end of row i of x lies the
    start of row i + 1, for keys in the future, which must be masked. With L = 2 and
    K = 3, the rows [0 a2 a1 a0] and [0 b2 b1 b0], where a and b are the two queries'
    scores by distance, become [a1 a0 0] and [b2 b1 b0].
    """
    H, B, L, Z = x_HBLZ.shape
    return x_HBLZ.reshape(H, B, Z, L)[:, :, 1:].reshape(H, B, L, Z - 1)


def visible_BLK(oldest_BL: Array, K: int) -> Array:
    """Returns the mask of visible keys, oldest <= j <= i + M for each query."""
    L = oldest_BL.shape[1]
    key_K = jnp.arange(K)
    newest_L = jnp.arange(L) + (K - L)
    return (key_K >= oldest_BL[..., None]) & (key_K <= newest_L[:, None])


def with_bias(q_BLHA: Array, bias_HA: Array | None) -> Array:
    """Returns q + u or q + w, in the queries' dtype.

    The sum is computed in float32, and so is the bias's gradient, a sum over streams
    and queries that would be wrong by several percent in bfloat16.
    """
    if bias_HA is None:
        return q_BLHA
    return (q_BLHA.astype(f32) + bias_HA.astype(f32)).astype(q_BLHA.dtype)


def repeat_farthest(position: PositionTerms, K: int) -> PositionTerms:
    """Returns terms of R = K, for kernels that need a row for each distance."""
    r_RHA, bias_HR = position.r_RHA, position.bias_HR
    if r_RHA is not None:
        widths, dtype = ((K - len(r_RHA), 0), (0, 0), (0, 0)), r_RHA.dtype
        # In float32, as in `minus_farthest`.
        r_RHA = jnp.pad(r_RHA.astype(f32), widths, "edge").astype(dtype)
    if bias_HR is not None:
        bias_HR = jnp.pad(bias_HR, ((0, 0), (K - bias_HR.shape[1], 0)), "edge")
    return position._replace(r_RHA=r_RHA, bias_HR=bias_HR)


def pad_front(x: Array, size: int, axis: int = -1, value: int = 0) -> Array:
    """Pads the front of one axis with `size` elements."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (size, 0)
    return jnp.pad(x, widths, constant_values=value)


def heads_first(x_BLHA: Array) -> Array:
    """Returns x_HBLA."""
    return x_BLHA.transpose(2, 0, 1, 3)
