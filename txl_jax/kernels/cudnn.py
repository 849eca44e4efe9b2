"""Attention by cuDNN's flash kernel, with the position scores as its bias.

One product computes the position scores by distance, in the operands' dtype; one pass
re-indexes them by key and masks them. All arrays have heads before streams, and cuDNN
gets S streams of one head, so that no array of scores is transposed.

Dims: R distances, Y nearest keys, T = B L queries, S = H B.
"""

import functools
import re
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from txl_jax.errors import UserError
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.kernels.xla import (
    heads_first,
    minus_farthest,
    pad_front,
    realign,
    visible_BLK,
    with_bias,
)


def obstacle(device: object, A: int, dtype: DTypeLike, dropout: bool) -> str:
    """Returns the reason why heads of A features cannot use the kernel, or ""."""
    capability = getattr(device, "compute_capability", "")
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < 8:
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "computes in bfloat16: set model.dtype=bfloat16"
    if dropout:
        return "has no dropout: set model.dropatt=0"
    # The largest heads that have gradients on all these GPUs.
    return "is limited to heads of 128 features" if A > 128 else ""


def rel_attention(
    operands: Operands, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Array:
    """Returns o_BLHA like `xla.rel_attention`, with rounded position scores.

    Raises UserError for unsupported operands. implementation: "xla" is for tests.
    """
    q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout = operands
    (B, L, H, A), K, device = q_BLHA.shape, k_BKHA.shape[1], jax.local_devices()[0]
    reason = obstacle(device, A, q_BLHA.dtype, dropout is not None)
    if reason and implementation == "cudnn":
        raise UserError(f'model.kernel = "cudnn" {reason} (or set model.kernel=auto)')
    # With a bias, cuDNN needs even numbers of queries and keys. If the last tile of 128
    # keys is half full, some versions return NaN gradients for a query whose scores are
    # all below -88 (github.com/pytorch/pytorch/issues/196678). So one newest query is
    # added, with its key, and hidden keys as the oldest.
    more, front = L % 2, (K + L % 2) % 2
    front += 64 * ((K + more + front) % 128 == 64)

    def lay_out(x_BLHA: Array, front: int) -> Array:
        x_SLA = heads_first(x_BLHA).reshape(H * B, -1, A)
        return jnp.pad(x_SLA, ((0, 0), (front, more), (0, -A % 8)))[:, :, None]

    score_HBLR = position_scores(q_BLHA, position, K)
    score_HBLR = jnp.pad(score_HBLR, ((0, 0), (0, 0), (0, more), (0, 0)))
    oldest_BL = jnp.pad(oldest_BL, ((0, 0), (0, more)), "edge") + front
    K += front + more
    bias_HBLK = shift_and_mask(score_HBLR, oldest_BL, score_HBLR.shape[-1], K)
    o_SL1A = jax.nn.dot_product_attention(
        lay_out(with_bias(q_BLHA, position.u_HA), 0),
        lay_out(k_BKHA, front),
        lay_out(v_BKHA, front),
        bias=bias_HBLK.reshape(H * B, 1, L + more, K),
        scale=A**-0.5,
        implementation=implementation,
    )
    return o_SL1A[:, :L, 0, :A].reshape(H, B, L, A).transpose(1, 2, 0, 3)


def position_scores(q_BLHA: Array, position: PositionTerms, K: int) -> Array:
    """Returns (q . r + bias) / sqrt(A) by distance, score_HBLR in the queries' dtype.

    If R < K, the scores are relative to the score of the farthest distance: see
    `xla.position_scores`. Without position terms there is one distance, of score 0.
    """
    (B, L, H, A), dtype, scale = q_BLHA.shape, q_BLHA.dtype, q_BLHA.shape[-1] ** -0.5
    r_RHA, _, w_HA, bias_HR = position
    score_HBLR = jnp.zeros((H, 1, 1, 1), jnp.float32)
    if r_RHA is not None:
        r_RHA = minus_farthest(r_RHA, 0) if len(r_RHA) < K else r_RHA
        q_BLHA = with_bias(q_BLHA.astype(jnp.float32), w_HA) * scale
        # If the gradient of r summed over B and L, the compiler would transpose scores.
        q_HTA = heads_first(q_BLHA.astype(dtype)).reshape(H, B * L, A)
        score_HTR = jnp.einsum("HTA,RHA->HTR", q_HTA, r_RHA)
        score_HBLR = score_HTR.reshape(H, B, L, -1)
    if bias_HR is not None:
        bias_HR = minus_farthest(bias_HR, 1) if bias_HR.shape[1] < K else bias_HR
        score_HBLR += bias_HR[:, None, None].astype(jnp.float32) * scale
    # Broadcast before the cast, so that the bias's gradient is summed in float32.
    return jnp.broadcast_to(score_HBLR, (H, B, L, score_HBLR.shape[-1])).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def shift_and_mask(score_HBLR: Array, oldest_BL: Array, R: int, K: int) -> Array:
    """Returns bias_HBLK: scores by key, 0 beyond R, very negative if hidden."""
    Y = min(K, R + score_HBLR.shape[2] - 1)
    score_HBLK = pad_front(realign(pad_front(score_HBLR, Y - R + 1)), K - Y)
    # JAX uses these numbers for cuDNN, which subtracts such scores from each other.
    far = -(2.0**15) if score_HBLK.dtype == jnp.float16 else -(2.0**41)
    return jnp.where(visible_BLK(oldest_BL, K), score_HBLK, far)


def backward(R: int, K: int, oldest_BL: Array, grad_HBLK: Array) -> tuple[Array, None]:
    """Returns the gradient of the scores by distance."""
    H, B, L, _ = grad_HBLK.shape
    Y = min(K, R + L - 1)
    grad_HBLK = jnp.where(visible_BLK(oldest_BL, K), grad_HBLK, 0)
    # The reverse of `realign`: adds the numbers in front that it drops.
    grad_HBYL = grad_HBLK[..., K - Y :].reshape(H, B, Y, L)
    grad_HBLZ = pad_front(grad_HBYL, 1, axis=2).reshape(H, B, L, Y + 1)
    return grad_HBLZ[..., Y + 1 - R :], None


shift_and_mask.defvjp(lambda *args: (shift_and_mask(*args), args[1]), backward)
