"""The relative positional encoding: R, one row per distance (section 3.3).

Dims: R distances, D model.
"""

import jax.numpy as jnp
from jax import Array


def sinusoid_RD(R: int, D: int, clamp_len: int) -> Array:
    """Returns the encoding of the distances R - 1, ..., 0, in float32.

    A row is [sin(p f), cos(p f)], halves side by side and not interleaved, with
    f_k = 10000^(-2k/D) and p the distance, at most clamp_len if that is not 0. Built
    in float32 always: bfloat16 has no integers beyond 256.
    """
    distance_R = jnp.arange(R - 1, -1, -1, dtype=jnp.float32)
    if clamp_len:
        distance_R = jnp.minimum(distance_R, clamp_len)
    frequency = 10_000.0 ** (-jnp.arange(0, D, 2, dtype=jnp.float32) / D)
    angle = distance_R[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
